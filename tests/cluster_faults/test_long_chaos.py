"""Minutes of random faults under 20 streams (tests/cluster_faults/chaos.py).

Ten by default (`--chaos-minutes`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster_faults.chaos import STREAMS, run_chaos

pytestmark = [pytest.mark.ray, pytest.mark.release]


@pytest.mark.timeout(1800)
def test_minutes_of_faults(tmp_path: Path, chaos_seed: int, pytestconfig: pytest.Config) -> None:
    minutes = pytestconfig.getoption("--chaos-minutes")
    chaos = run_chaos(tmp_path, seed=chaos_seed, seconds=60.0 * minutes)
    assert chaos.num_faults >= 5 * minutes
    assert chaos.num_answers > 2 * STREAMS * minutes

"""Ten minutes of random faults under 20 streams (tests/cluster_faults/chaos.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster_faults.chaos import STREAMS, run_chaos

pytestmark = [pytest.mark.ray, pytest.mark.long]

SECONDS = 600.0


@pytest.mark.timeout(SECONDS + 600)
def test_ten_minutes_of_faults(tmp_path: Path, chaos_seed: int) -> None:
    chaos = run_chaos(tmp_path, seed=chaos_seed, seconds=SECONDS)
    assert chaos.num_faults >= 50
    assert chaos.num_answers > 20 * STREAMS

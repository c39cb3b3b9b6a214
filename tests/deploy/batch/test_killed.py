"""A batch on replayed devices is killed five times: the same bytes, and flat memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deploy.batch.killed import run_both

pytestmark = pytest.mark.long

GROWTH_BYTES = 24 << 20
"""By which a process may grow after a quarter of the rows: caches, and the allocator's pools."""


def test_a_batch_that_is_killed_five_times_yields_the_same_bytes(tmp_path: Path) -> None:
    found = run_both(tmp_path, num_rows=1500, kills=5, seed=18)
    assert max(found.growth) < GROWTH_BYTES

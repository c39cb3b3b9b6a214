"""A batch on replayed devices is killed some times: the same bytes, and flat memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deploy.batch.killed import run_both
from tests.release import at_release

pytestmark = pytest.mark.long

GROWTH_BYTES = 24 << 20
"""By which a process may grow after a quarter of the rows: caches, and the allocator's pools."""


@pytest.mark.parametrize(("num_rows", "kills"), [(300, 2), *at_release([(1500, 5)])])
def test_a_batch_that_is_killed_yields_the_same_bytes(
    tmp_path: Path, num_rows: int, kills: int
) -> None:
    found = run_both(tmp_path, num_rows=num_rows, kills=kills, seed=18)
    assert max(found.growth) < GROWTH_BYTES

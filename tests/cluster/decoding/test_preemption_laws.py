"""Rules that toss coins keep the law when a sequence loses its KV blocks half-way: exactly.

An older sequence needs the blocks. Blocks are taken between two steps, so never from a window that
is being verified, but run-ahead is pending, and more arrives while the sequence waits and is
computed again. The token after what is computed again is the target's own, and run-ahead stays
where it agrees. Every draw and every coin is summed over; see law_world.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.cluster.decoding.law_breaks import forget_some_of_what_was_lost
from tests.cluster.decoding.law_cases import CHAIN, FANOUT, PEARL, Case
from tests.cluster.decoding.law_faults import Preemption
from tests.cluster.decoding.law_world import Timing
from tests.cluster.served_laws import trusts_what_was_drafted

pytestmark = pytest.mark.long

BOTH = ("recycling", "branching")

# Blocks in all: with more, they are taken later. With these, run-ahead is pending.
REJECTION = Case("rejection", CHAIN, 1, 1, Timing(2), 2, Preemption(8))
CASES = [
    REJECTION,
    replace(REJECTION, fault=Preemption(7)),
    *(
        replace(one, fault=Preemption(num_blocks))
        for num_blocks in (8, 9)
        for one in (
            Case("rejection", CHAIN, 1, 2, Timing(3, 1), 2, length=4),
            Case("kseq", CHAIN, 2, 2, Timing(2), 2),
            Case("recursive", CHAIN, 2, 2, Timing(2), 2),
            Case("mcsd", CHAIN, 2, 2, Timing(2), 2),
        )
    ),
    Case("rejection", PEARL, 1, 2, Timing(2), 2, Preemption(9)),
    *(
        replace(one, fault=Preemption(num_blocks))
        for num_blocks in (9, 10)
        for one in (
            Case("one-hot", FANOUT, 1, 3, Timing(2), 3, None, 4, ("branching",)),
            Case("one-hot", FANOUT, 1, 3, Timing(2), 3, None, 4, BOTH, merge=True),
        )
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_law_is_the_targets_though_blocks_are_taken(case: Case) -> None:
    held = case.check_exact().preempted_with
    assert max(held) > 0, "run-ahead was pending"


# Negative controls: each is wrong by more than rounding.


@pytest.mark.parametrize("broken", [trusts_what_was_drafted, forget_some_of_what_was_lost])
def test_what_is_broken_is_noticed(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    replace(REJECTION, fault=Preemption(7), length=4).check_noticed()

"""Rules that toss coins keep the law exactly, though the target is lost or a request is paused.

A lost step has no verdict. The sequence is computed again from its committed tokens, the token
after them is the target's own, and what was drafted beyond stays where it agrees with that token.
So with a seed the text is another one than without the fault, and its law is the same. Every draw
and every coin is summed over; see law_world.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cluster.decoding.law_breaks import forget_some_of_what_was_lost
from tests.cluster.decoding.law_cases import CHAIN, LOCKSTEP, PEARL, Case
from tests.cluster.decoding.law_faults import Pause, TargetFault
from tests.cluster.decoding.law_world import Timing
from tests.cluster.served_laws import trusts_what_was_drafted

pytestmark = pytest.mark.long

REJECTION = Case("rejection", CHAIN, 1, 1, Timing(2), 3, TargetFault(2))
ONE_HOT_FAULT = TargetFault(3, away=1, verified=True)
KSEQ = Case("kseq", CHAIN, 2, 4, Timing(3), 2, TargetFault(2))
RECURSIVE = Case("recursive", CHAIN, 2, 3, Timing(3), 2, TargetFault(2))
CASES = (
    REJECTION,
    Case("rejection", CHAIN, 1, 2, Timing(3, 1), 2, TargetFault(2, away=1), length=4),
    Case("rejection", CHAIN, 1, 1, Timing(2), 2, TargetFault(3), length=4),
    Case(
        "rejection",
        CHAIN,
        1,
        2,
        Timing(3),
        2,
        TargetFault(2, away=2, drafter_too=True),
        length=4,
    ),
    Case("rejection", LOCKSTEP, 1, 2, Timing(0), 2, TargetFault(2), length=4),
    Case("rejection", PEARL, 1, 2, Timing(3, 1), 2, TargetFault(2)),
    KSEQ,
    Case("kseq", CHAIN, 2, 2, Timing(2), 2, TargetFault(3)),
    Case("kseq", CHAIN, 2, 4, Timing(3), 2, TargetFault(2, away=1, drafter_too=True)),
    RECURSIVE,
    Case("recursive", LOCKSTEP, 2, 3, Timing(0), 3, TargetFault(2)),
    Case("recursive", CHAIN, 2, 3, Timing(3), 2, TargetFault(2, away=1, drafter_too=True)),
    Case("mcsd", CHAIN, 2, 3, Timing(3), 2, TargetFault(2)),
    Case("mcsd", CHAIN, 2, 2, Timing(2), 2, TargetFault(3, away=1)),
    # The step was verified, and another window is verified with the same coins.
    Case("rejection", CHAIN, 1, 2, Timing(3, 1), 2, TargetFault(2, away=1, verified=True)),
    Case("rejection", PEARL, 1, 2, Timing(3, 1), 2, TargetFault(3, verified=True)),
    Case("recursive", CHAIN, 2, 3, Timing(3), 2, TargetFault(2, verified=True)),
    Case("one-hot", CHAIN, 2, 3, Timing(2), 3, ONE_HOT_FAULT, 4, ("branching",)),
    Case("rejection", CHAIN, 1, 2, Timing(3, 1), 2, Pause(2), length=4),
    Case("rejection", PEARL, 1, 2, Timing(3, 1), 2, Pause(2)),
    Case("kseq", CHAIN, 2, 4, Timing(3), 2, Pause(2)),
    Case("recursive", CHAIN, 2, 3, Timing(3), 2, Pause(2)),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_law_is_the_targets_though_the_target_is_lost(case: Case) -> None:
    case.check_exact()


def test_candidates_of_before_are_verified_after() -> None:
    """So the test above is about what it says: a first window of theirs has no draft of after."""
    lost = KSEQ.serve().windows
    assert any(part.start == 0 and len(part.token_ids) > 1 for part in lost), "computed again"
    assert {part.multiplicities for part in lost} >= {(2,), (1,)}


# Negative controls: each is wrong by more than rounding.


@pytest.mark.parametrize("case", [REJECTION, KSEQ, RECURSIVE], ids=str)
@pytest.mark.parametrize("broken", [trusts_what_was_drafted, forget_some_of_what_was_lost])
def test_what_is_broken_is_noticed(
    case: Case, broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    case.check_noticed()

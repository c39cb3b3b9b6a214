"""Rules that toss coins keep the law exactly when a broken stream is resumed at another driver.

The new driver knows the tokens that the caller has, and the seed, so that coins of the first driver
fall again. The sum runs over every draw and every coin; see law_world.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.cluster.decoding.law_cases import CHAIN, FANOUT, LOCKSTEP, PEARL, Case
from tests.cluster.decoding.law_faults import BrokenStream
from tests.cluster.decoding.law_world import Timing
from tests.cluster.served_laws import trusts_what_was_drafted

pytestmark = pytest.mark.long

REJECTION = Case("rejection", LOCKSTEP, 1, 2, Timing(0), 2, BrokenStream(2), length=4)
AHEAD = Case("rejection", CHAIN, 1, 2, Timing(3, 1), 2, BrokenStream(3), length=4)
KSEQ = Case("kseq", CHAIN, 2, 4, Timing(3), 2, BrokenStream(2))
RECURSIVE = Case("recursive", LOCKSTEP, 2, 3, Timing(0), 3, BrokenStream(2))
CASES = (
    REJECTION,
    AHEAD,
    Case("rejection", PEARL, 1, 2, Timing(3, 1), 2, BrokenStream(2)),
    KSEQ,
    RECURSIVE,
    Case("mcsd", CHAIN, 2, 3, Timing(3), 2, BrokenStream(2)),
    Case("one-hot", FANOUT, 1, 3, Timing(2), 3, BrokenStream(3), 4, ("branching",)),
)
VERIFIED = [
    replace(one, fault=replace(one.fault, verified=True))
    for one in CASES
    if isinstance(one.fault, BrokenStream)
]


@pytest.mark.parametrize("case", [*CASES, *VERIFIED], ids=str)
def test_the_law_is_the_targets_though_the_stream_is_resumed(case: Case) -> None:
    """Also if candidates were verified whose tokens the caller does not have."""
    case.check_exact()


def test_candidates_are_verified_after_it() -> None:
    """So the test above reaches its case: the new driver computes the text again, and drafts."""
    windows = RECURSIVE.serve().windows
    again = [index for index, part in enumerate(windows) if part.start == 0 and index]
    assert again
    assert any(part.window for part in windows[again[0] :])


# Negative controls: each is wrong by more than rounding.


@pytest.mark.parametrize("case", [AHEAD, KSEQ], ids=str)
def test_a_wrong_rule_is_noticed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    trusts_what_was_drafted(monkeypatch)
    case.check_noticed()


@pytest.mark.parametrize("case", [REJECTION, RECURSIVE], ids=str)
def test_a_break_that_depends_on_tokens_is_noticed(case: Case) -> None:
    """A caller who breaks off where it does not like the verdict chooses among texts."""
    replace(case, fault=BrokenStream(2, if_refused=True)).check_noticed()

"""Candidates that a structure forces are held, and those that it refuses are cut."""

from __future__ import annotations

from collections.abc import Sequence as TokenIds
from dataclasses import replace
from typing import Any

import pytest

from cluster.decoding.events import Proposal, Request
from cluster.decoding.sequence import Sequence
from cluster.decoding.structures import note_committed, without_refused
from paceline.errors import InternalError
from paceline.prefix_hash import hash_prefix
from paceline.sampling import SamplingParams, SequenceSpec
from tests.workers.verification.remainders import Remainders

PROMPT = (5, 6)


class Forcing(Remainders):
    """It says that the tokens 1, 3, 3 are forced, after any text."""

    def forced(self) -> list[int]:
        return [1, 3, 3]


class Failing(Remainders):
    def advance(self, token_ids: TokenIds[int]) -> int:
        raise InternalError("too many states")


def _sequence(matcher: Remainders, *, rule: str = "coupled", **changes: Any) -> Sequence:
    spec = SequenceSpec(SamplingParams(), 0, prompt_length=2, rule=rule)
    asked = Request(1, PROMPT, spec, 20, "chain", 8, branches=3, matcher=matcher)
    return Sequence.admitted(replace(asked, **changes), 0.0)


def _commit(sequence: Sequence, token_ids: tuple[int, ...]) -> None:
    sequence.tree.advance(token_ids)
    note_committed(sequence, token_ids)
    sequence.tree.check_integrity()


def _held(sequence: Sequence) -> tuple[int, ...]:
    return sequence.tree.pin(8).token_ids


@pytest.mark.parametrize("branches", [1, 3])
def test_forced_tokens_are_held_after_what_is_committed(branches: int) -> None:
    sequence = _sequence(Forcing(9), branches=branches)
    _commit(sequence, (0,))
    assert _held(sequence) == (1, 3, 3)
    assert sequence.useful_candidates == 3


def test_forced_tokens_end_before_the_last_token_and_within_the_window() -> None:
    for changes, expected in (
        ({"max_tokens": 3}, (1,)),
        ({"max_tokens": 2}, ()),
        ({"window": 2, "branches": 1}, (1, 3)),
        ({"policy": "off"}, ()),
        ({"rule": "kseq"}, ()),
    ):
        sequence = _sequence(Forcing(9), **changes)
        _commit(sequence, (0,))
        assert _held(sequence) == expected, changes


def test_forced_tokens_have_a_distribution_where_the_rule_needs_one() -> None:
    sequence = _sequence(Forcing(9), rule="rejection", branches=1)
    _commit(sequence, (0,))
    distributions = sequence.tree.pin(8).distributions
    assert [distributions[node].token_ids_M.tolist() for node in range(3)] == [[1], [3], [3]]
    assert all(one.probs_M.tolist() == [1.0] for one in distributions.values())


def test_a_matcher_that_fails_helps_no_more() -> None:
    for matcher, token_ids in ((Failing(9), (0,)), (Remainders(9), (2,))):
        sequence = _sequence(matcher)
        _commit(sequence, token_ids)  # the second is refused
        assert sequence.matcher is None
        assert _held(sequence) == ()


def test_refused_candidates_are_cut_with_what_follows_them() -> None:
    sequence = _sequence(Remainders(9))
    _commit(sequence, (0,))
    base = (3, hash_prefix((*PROMPT, 0)))
    chain = Proposal(1, *base, (0, 3, 2, 1))  # text (0, 0, 3): its sum and length make 6
    assert without_refused(sequence, chain).token_ids == (0,)
    tree = Proposal(1, *base, (1, 0, 2, 2, 5, 8), parents=(0, 0, 2, 1, 3, 2))
    cut = without_refused(sequence, tree)
    assert (cut.token_ids, cut.parents) == ((0, 2, 5, 8), (0, 1, 2, 1))
    accepts = Remainders(9).accepts
    assert all(accepts((0, *path)) == 1 + len(path) for path in ((0,), (0, 2, 5), (0, 8)))
    assert all(accepts((0, *path)) <= len(path) for path in ((1,), (1, 2)))
    elsewhere = Proposal(1, 2, hash_prefix(PROMPT), (0, 2))
    assert without_refused(sequence, elsewhere) is elsewhere

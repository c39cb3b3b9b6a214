"""Proposals of one token each go over the wire in columns, and come out as they went in."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cluster.proposals_wire import read_proposals, tips_from_wire
from cluster.requests import Speculation
from paceline.errors import ProtocolError
from paceline.prefix_hash import hash_prefix
from paceline.rules import MAX_PROPOSED, Rule
from paceline.v1 import drafting_pb2
from workers.drafting.desk import DraftingDesk, SessionNews
from workers.drafting.ngram import NgramProposer
from workers.drafting.proposal import Proposal
from workers.drafting.wire import to_responses

_SPECULATION = Speculation(branches=3)


def _there_and_back(proposals: Sequence[Proposal]) -> tuple[int, list[Proposal]]:
    """How many of the messages were in columns, and what was read."""
    batch = _batch_of(proposals)
    read = read_proposals(batch, lambda _: _SPECULATION, vocab_size=100, drafter="a")
    assert (read.malformed, read.dropped) == (0, 0)
    return len(batch.tips), read.proposals


def _batch_of(proposals: Sequence[Proposal]) -> drafting_pb2.ProposalBatch:
    session = DraftingDesk(NgramProposer(), max_sequences=1).open_session()
    news = SessionNews(session, 1, list(proposals))
    (response,) = to_responses(news, 0.0025)
    return drafting_pb2.DraftResponse.FromString(response.SerializeToString()).proposals


def _tip(sequence_id: int, *token_ids: int) -> Proposal:
    prefix = token_ids[:-1]
    return Proposal(sequence_id, len(prefix), hash_prefix(prefix), token_ids[-1:])


def test_tokens_under_many_bases_are_told_in_columns() -> None:
    tips = [_tip(1, 5, 6), _tip(2, 7), _tip(1, 5, 7), _tip(2, 8, 9), _tip(3, 4)]
    assert _there_and_back(tips) == (1, tips)
    assert _there_and_back(tips[::2]) == (1, tips[::2])
    of_one = [_tip(7, 5, 6), _tip(7, 5, 7)]
    assert _there_and_back(of_one) == (1, of_one)


def test_columns_are_cut_where_they_become_too_long() -> None:
    tips = [_tip(number, 5, 6) for number in range(2 * MAX_PROPOSED + 1)]
    assert _there_and_back(tips) == (3, tips)


def test_what_is_for_sequences_that_have_ended_is_left_out() -> None:
    tips = [_tip(1, 5, 6), _tip(2, 7), _tip(1, 5, 7)]
    batch = _batch_of([*tips, Proposal(2, 0, 1, (5, 6)), Proposal(1, 0, 1, (5, 6))])
    read = read_proposals(
        batch, lambda one: _SPECULATION if one == 2 else None, vocab_size=100, drafter="a"
    )
    assert [one.sequence_id for one in read.proposals] == [2, 2]
    assert (read.dropped, read.malformed) == (3, 0)


def test_what_says_more_than_a_token_is_told_apart() -> None:
    first, second = _tip(1, 5, 6), _tip(1, 5, 7)
    base = (1, 2, hash_prefix((3, 4)))
    others = [
        Proposal(*base, (5, 6)),
        Proposal(*base, (5,), last=True),
        Proposal(*base, ()),
        Proposal(*base, (5, 6), parents=(0, 0)),
        Proposal(*base, (5,), stopping_state={"threshold": 0.5}),
    ]
    for other in others:
        assert _there_and_back([first, other, second]) == (1, [other, first, second])
    assert _there_and_back([first, others[0]]) == (0, [first, others[0]])


@pytest.mark.parametrize(
    ("lengths", "hashes", "token_ids", "says"),
    [
        ([], [], [], "expected 1 to"),
        ([1], [2, 3], [4, 5], "got 1, 2, 2 and 2"),
        ([1, 2], [2, 3], [4], "got 2, 2, 1 and 1"),
        ([1] * (MAX_PROPOSED + 1), [2] * (MAX_PROPOSED + 1), [3] * (MAX_PROPOSED + 1), "1024"),
        ([1], [2], [100], "below 100"),
    ],
)
def test_columns_that_break_the_contract_are_refused(
    lengths: list[int], hashes: list[int], token_ids: list[int], says: str
) -> None:
    message = drafting_pb2.Tips(
        sequence_id=1, base_lengths=lengths, base_hashes=hashes, token_ids=token_ids
    )
    with pytest.raises(ProtocolError, match=says):
        tips_from_wire(message, lambda _: _SPECULATION, vocab_size=100)


def test_as_many_sequences_are_named_as_there_are_tokens() -> None:
    message = drafting_pb2.Tips(
        sequence_ids=[1, 2, 3], base_lengths=[1, 1], base_hashes=[2, 3], token_ids=[4, 5]
    )
    with pytest.raises(ProtocolError, match="got 2, 2, 2 and 3"):
        tips_from_wire(message, lambda _: _SPECULATION, vocab_size=100)


def test_rules_that_need_distributions_take_none() -> None:
    message = drafting_pb2.Tips(sequence_id=1, base_lengths=[1], base_hashes=[2], token_ids=[3])
    one_hot, rejection = Speculation(rule=Rule.ONE_HOT), Speculation(rule=Rule.REJECTION)
    assert len(tips_from_wire(message, lambda _: one_hot, vocab_size=100)) == 1
    with pytest.raises(ProtocolError, match="distributions"):
        tips_from_wire(message, lambda _: rejection, vocab_size=100)
    batch = drafting_pb2.ProposalBatch(tips=[message])
    read = read_proposals(batch, lambda _: rejection, vocab_size=100, drafter="a")
    assert (read.proposals, read.malformed) == ([], 1)

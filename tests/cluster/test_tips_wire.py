"""Proposals of one token each go over the wire in columns, and come out as they went in."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cluster.worker_wire import proposals_from_wire
from paceline.errors import ProtocolError
from paceline.prefix_hash import hash_prefix
from paceline.rules import MAX_PROPOSED, Rule
from paceline.v1 import drafting_pb2
from workers.drafting.desk import DraftingDesk, SessionNews
from workers.drafting.ngram import NgramProposer
from workers.drafting.proposal import Proposal
from workers.drafting.wire import to_responses


def _there_and_back(proposals: Sequence[Proposal]) -> tuple[int, list[Proposal]]:
    """How many of the messages were in columns, and what was read."""
    session = DraftingDesk(NgramProposer(), max_sequences=1).open_session()
    news = SessionNews(session, 1, list(proposals))
    (response,) = to_responses(news, 0.0025)
    batch = drafting_pb2.DraftResponse.FromString(response.SerializeToString()).proposals
    read = [
        one
        for message in (*batch.proposals, *batch.tips)
        for one in proposals_from_wire(message, Rule.COUPLED, branches=3, vocab_size=100)
    ]
    return len(batch.tips), read


def _tip(sequence_id: int, *token_ids: int) -> Proposal:
    prefix = token_ids[:-1]
    return Proposal(sequence_id, len(prefix), hash_prefix(prefix), token_ids[-1:])


def test_tokens_under_many_bases_are_told_in_columns_a_sequence() -> None:
    tips = [_tip(1, 5, 6), _tip(2, 7), _tip(1, 5, 7), _tip(2, 8, 9), _tip(3, 4)]
    in_columns, read = _there_and_back(tips)
    assert in_columns == 2
    assert sorted(read, key=repr) == sorted(tips, key=repr)


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
    assert _there_and_back([first, others[0]]) == (0, [others[0], first])


@pytest.mark.parametrize(
    ("lengths", "hashes", "token_ids", "says"),
    [
        ([], [], [], "expected 1 to"),
        ([1], [2, 3], [4, 5], "got 1, 2 and 2"),
        ([1, 2], [2, 3], [4], "got 2, 2 and 1"),
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
        proposals_from_wire(message, Rule.COUPLED, branches=3, vocab_size=100)


def test_rules_that_need_distributions_take_none() -> None:
    message = drafting_pb2.Tips(sequence_id=1, base_lengths=[1], base_hashes=[2], token_ids=[3])
    assert len(proposals_from_wire(message, Rule.ONE_HOT, branches=1, vocab_size=100)) == 1
    with pytest.raises(ProtocolError, match="distributions"):
        proposals_from_wire(message, Rule.REJECTION, branches=1, vocab_size=100)

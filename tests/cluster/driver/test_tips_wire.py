"""Proposals of one token each cross the wire in columns, and arrive unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from cluster.decoding.events import Proposed
from cluster.driver.fitting import Speculation
from cluster.driver.worker_messages import draft_events, read_proposals, tips_from_wire
from paceline.errors import ProtocolError
from paceline.limits import MAX_PROPOSED
from paceline.prefix_hash import hash_prefix
from paceline.sampling import SamplingParams, SequenceSpec
from paceline.v1 import drafting_pb2
from workers.drafting.desk import DraftingDesk, SessionNews
from workers.drafting.kind import Draft
from workers.drafting.kinds.ngram import NgramProposer
from workers.drafting.proposal import Proposal, proposals_of
from workers.drafting.tree import DraftTree, Grant, NewNodes
from workers.drafting.wire import to_responses

_SPECULATION = Speculation(branches=3)


def _there_and_back(proposals: Sequence[Proposal]) -> tuple[int, list[Proposal]]:
    """The number of messages in columns, and the proposals that were read."""
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
    tips = [_tip(number, 5, 6) for number in range(MAX_PROPOSED + 1)]
    assert _there_and_back(tips) == (2, tips)


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
        Proposal(*base, (), last=True),
        Proposal(*base, (5, 6), parents=(0, 0)),
        Proposal(*base, (5,), stopping_state={"threshold": 0.5}),
    ]
    for other in others:
        assert _there_and_back([first, other, second]) == (1, [other, first, second])
    assert _there_and_back([first, others[0]]) == (0, [first, others[0]])


def test_the_last_of_a_sequence_is_told_in_columns_too() -> None:
    tips = [_tip(1, 5, 6), _tip(2, 7), _tip(1, 5, 7), _tip(2, 8, 9), _tip(3, 4)]
    tips[2], tips[4] = replace(tips[2], last=True), replace(tips[4], last=True)
    assert _there_and_back(tips) == (1, tips)
    of_one = [_tip(7, 5, 6), replace(_tip(7, 5, 7), last=True)]
    assert _there_and_back(of_one) == (1, of_one)
    many = [_tip(number % 7, number % 50) for number in range(MAX_PROPOSED + 10)]
    many[-7:] = [replace(one, last=True) for one in many[-7:]]
    assert _there_and_back(many) == (2, many)


def test_what_is_last_of_a_sequence_that_has_ended_is_left_out() -> None:
    batch = _batch_of([replace(_tip(1, 5, 6), last=True), replace(_tip(2, 7), last=True)])
    read = read_proposals(
        batch, lambda one: _SPECULATION if one == 2 else None, vocab_size=100, drafter="a"
    )
    assert (read.dropped, read.malformed) == (1, 0)
    assert read.proposals == [replace(_tip(2, 7), last=True)]


@pytest.mark.parametrize("of", [{"sequence_id": 1}, {"sequence_ids": [1, 1]}])
def test_nothing_is_last_of_a_sequence_without_entries(of: dict[str, Any]) -> None:
    message = drafting_pb2.Tips(
        base_lengths=[1, 1], base_hashes=[2, 3], token_ids=[4, 5], last_of=[1, 8], **of
    )
    with pytest.raises(ProtocolError, match="last_of: expected sequences of these entries, got 8"):
        tips_from_wire(message, lambda _: _SPECULATION, vocab_size=100)


def test_a_level_of_a_tree_goes_out_in_columns_in_the_order_of_its_drawing() -> None:
    tree = DraftTree(SequenceSpec(SamplingParams(), seed=1, prompt_length=1), [5], max_position=99)
    tree.set_grant(Grant(9, branches=3, nodes=6))
    levels = []
    for new in (NewNodes((6, 7), (0, 0)), NewNodes((8, 9, 6, 7), (2, 1, 1, 2))):
        first_new = tree.end + 1
        tree.extend(new)
        levels.append(proposals_of(1, Draft(tree, new), first_new))
    first, then = levels
    assert _there_and_back(first) == (1, first)
    assert _there_and_back(then) == (1, then)
    paths = [(5, 6), (5, 7), (5, 7, 8), (5, 6, 9), (5, 6, 6), (5, 7, 7)]
    told = [Proposal(1, len(path) - 1, hash_prefix(path[:-1]), path[-1:]) for path in paths]
    assert [*first, *then] == [*told[:-1], replace(told[-1], last=True)], "the grant is used up"


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


@pytest.mark.parametrize("seed", range(40))
def test_columns_of_any_shape_are_read_or_refused(seed: int) -> None:
    """What is read is sound and of existing sequences. The rest counts as malformed, not as a
    defect.
    """
    random = Random(seed)
    count = random.randrange(1, 6)

    def some(most: int) -> list[int]:
        odd = random.random() < 0.1
        return [random.randrange(most) for _ in range(random.randrange(8) if odd else count)]

    message = drafting_pb2.Tips(
        sequence_id=random.randrange(3),
        sequence_ids=some(4) if random.random() < 0.8 else [],
        base_lengths=some(1 << 32),
        base_hashes=some(1 << 64),
        token_ids=some(101 if random.random() < 0.3 else 100),
        last_of=some(4)[:2] if random.random() < 0.3 else [],
    )
    sizes = {len(message.base_lengths), len(message.base_hashes), len(message.token_ids)}
    sizes |= {len(message.sequence_ids)} if message.sequence_ids else set()
    named = set(message.sequence_ids or [message.sequence_id])
    is_sound = len(sizes) == 1 and 0 not in sizes and set(message.last_of) <= named
    is_sound = is_sound and max(message.token_ids) < 100
    batch = drafting_pb2.ProposalBatch(tips=[message])
    read = read_proposals(
        batch, lambda one: _SPECULATION if one < 2 else None, vocab_size=100, drafter="a"
    )
    assert read.malformed == (not is_sound)
    if is_sound:
        assert read.dropped + len(read.proposals) == len(message.token_ids)
        assert all(one.sequence_id < 2 and len(one.token_ids) == 1 for one in read.proposals)
        told_last = [one.sequence_id for one in read.proposals if one.last]
        assert sorted(told_last) == sorted({one for one in message.last_of if one < 2})
    else:
        assert read.proposals == []


def test_rules_that_need_distributions_take_none() -> None:
    message = drafting_pb2.Tips(sequence_id=1, base_lengths=[1], base_hashes=[2], token_ids=[3])
    one_hot, rejection = Speculation(rule="one-hot"), Speculation(rule="rejection")
    assert len(tips_from_wire(message, lambda _: one_hot, vocab_size=100)) == 1
    with pytest.raises(ProtocolError, match="distributions"):
        tips_from_wire(message, lambda _: rejection, vocab_size=100)
    batch = drafting_pb2.ProposalBatch(tips=[message])
    read = read_proposals(batch, lambda _: rejection, vocab_size=100, drafter="a")
    assert (read.proposals, read.malformed) == ([], 1)


def test_passes_made_one_after_another_share_their_time() -> None:
    """No drafter of ours sends their number; without it, it was one."""
    for sent, passes in ((0, 1), (4, 4)):
        batch = drafting_pb2.ProposalBatch(pass_seconds=0.5, passes=sent)
        read = read_proposals(batch, lambda _: None, vocab_size=100, drafter="a")
        [proposed] = draft_events(1.0, "a", batch, read, 0)
        assert isinstance(proposed, Proposed)
        assert (proposed.passes, proposed.seconds_a_pass) == (passes, 0.5 / passes)

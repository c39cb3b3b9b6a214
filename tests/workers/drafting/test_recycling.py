"""Token Recycling: rows are learned, shared within a tenant, kept, and used for drafts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.errors import ProtocolError
from paceline.options import Stopping
from paceline.sampling import SamplingParams, SequenceSpec
from workers.drafting.desk import DraftingDesk, DraftingSession
from workers.drafting.kind import TopTokens
from workers.drafting.kinds.recycling import (
    MAX_ROWS,
    MAX_TABLES,
    RecyclingProposer,
    RowKey,
    RowTable,
)
from workers.drafting.proposal import Proposal
from workers.drafting.tree import Grant
from workers.verification.candidates import CandidateTree

SPEC = SequenceSpec(SamplingParams(), seed=0, prompt_length=1, end_token_ids=(99,))


def rows(table: dict[int, Sequence[int]]) -> list[TopTokens]:
    return [TopTokens(token_id, tuple(top_ids)) for token_id, top_ids in table.items()]


@pytest.fixture
def desk() -> DraftingDesk:
    return DraftingDesk(RecyclingProposer(), max_sequences=100)


@pytest.fixture
def session(desk: DraftingDesk) -> DraftingSession:
    return desk.open_session()


def draft(desk: DraftingDesk, session: DraftingSession, grant: Grant) -> Proposal:
    """The proposal for sequence 1 after a grant."""
    session.grant(1, grant)
    (news,) = desk.run_pass()
    desk.check_integrity()
    assert not desk.has_work
    (proposal,) = news.proposals
    assert proposal.last
    return proposal


def test_the_first_of_each_row_makes_a_chain(desk: DraftingDesk, session: DraftingSession) -> None:
    session.open(1, SPEC, [5])
    assert draft(desk, session, Grant(9)).token_ids == ()
    session.outcome(1, 1, [6], rows({5: [6, 7], 6: [8, 5], 8: [6, 1]}))
    proposal = draft(desk, session, Grant(7))
    assert (proposal.token_ids, proposal.parents) == ((8, 6, 8, 6, 8), ())
    # The last row counts, and an end token ends.
    session.outcome(1, 2, [7], rows({6: [99, 8], 7: [6]}))
    assert draft(desk, session, Grant(9)).token_ids == (6, 99)


def test_rows_of_a_prompt_are_learned_before_anything_is_committed(
    desk: DraftingDesk, session: DraftingSession
) -> None:
    session.open(1, SPEC, [5])
    session.outcome(1, 1, [], rows({5: [6, 7], 6: [8, 5]}))
    proposal = draft(desk, session, Grant(3))
    assert (proposal.base_length, proposal.token_ids) == (1, (6, 8))
    with pytest.raises(ProtocolError, match=r"outcome\.token_ids: expected at least one token"):
        session.outcome(1, 1, [])


def test_a_tree_follows_the_rows(desk: DraftingDesk, session: DraftingSession) -> None:
    session.open(1, SPEC, [5])
    session.outcome(1, 1, [6], rows({6: [8, 9], 8: [10, 11], 9: [12]}))
    proposal = draft(desk, session, Grant(4, branches=8, nodes=20))
    tree = CandidateTree(proposal.token_ids, proposal.parents)
    children = [tree.tokens_of(tree.children(node)) for node in range(len(tree) + 1)]
    assert children[0] == [8, 9]
    assert children[tree.token_ids.index(8) + 1] == [10, 11]
    assert children[tree.token_ids.index(9) + 1] == [12]
    assert len(tree) == 5
    # Three nodes are the three that are worth most.
    session.outcome(1, 2, [6])
    proposal = draft(desk, session, Grant(5, branches=8, nodes=3))
    assert proposal.token_ids == (8, 9, 10)
    # And with two children a node at most, the third of a row is left out.
    session.outcome(1, 3, [6], rows({6: [1, 2, 3], 1: [], 2: []}))
    assert draft(desk, session, Grant(5, branches=2, nodes=9)).token_ids == (1, 2)


def test_the_row_of_two_tokens_comes_before_that_of_one(
    desk: DraftingDesk, session: DraftingSession
) -> None:
    session.open(1, SPEC, [4, 5])
    session.outcome(
        1, 2, [6], [TopTokens(6, (7,), 5), TopTokens(7, (8,), 6), TopTokens(7, (9,), 1)]
    )
    assert draft(desk, session, Grant(5)).token_ids == (7, 8)
    session.outcome(1, 3, [2, 7])
    assert draft(desk, session, Grant(6)).token_ids == (9,), "7 after 2 is new: its last row"
    session.outcome(1, 5, [6], [TopTokens(6, (1,), None)])
    assert draft(desk, session, Grant(8)).token_ids == (1,), "and so is 6 after 7"


def test_rows_of_two_tokens_are_so_many() -> None:
    table = RowTable()
    for number in range(MAX_ROWS + 1):
        table.learn(TopTokens(1, (number,), number))
    assert table.row(0, 1) == (RowKey.TOKEN, (MAX_ROWS,))
    assert table.row(1, 1) == (RowKey.PAIR, (1,))
    for token_id in range(2, MAX_ROWS + 2):
        table.learn(TopTokens(token_id, (9,)))
    assert table.row(None, 1) == (RowKey.TOKEN, ()), "the rows of tokens are no more either"
    assert table.row(None, 2) == (RowKey.TOKEN, (9,))


def test_what_is_left_of_a_tree_is_not_told_again(
    desk: DraftingDesk, session: DraftingSession
) -> None:
    session.open(1, SPEC, [5])
    table = rows({6: [8, 9], 8: [10, 11], 10: [12], 12: [13]})
    session.outcome(1, 1, [6], table)
    draft(desk, session, Grant(4, branches=4, nodes=20))
    session.outcome(1, 2, [8])
    proposal = draft(desk, session, Grant(6, branches=4, nodes=20))
    assert (proposal.base_length, proposal.token_ids) == (4, (12, 13))


def test_rows_outlive_sequences_and_streams_but_never_leave_a_tenant(desk: DraftingDesk) -> None:
    first = desk.open_session()
    first.open(1, SPEC, [5], tenant="a")
    first.outcome(1, 1, [6], rows({6: [8]}))
    desk.close_session(first)
    second = desk.open_session()
    second.open(1, SPEC, [5, 6], tenant="b")
    assert draft(desk, second, Grant(3)).token_ids == ()
    second.open(1, SPEC, [5, 6], tenant="")
    assert draft(desk, second, Grant(3)).token_ids == ()
    second.open(1, SPEC, [5, 6], tenant="a")
    assert draft(desk, second, Grant(3)).token_ids == (8,)


def test_sequences_of_a_tenant_learn_from_each_other(
    desk: DraftingDesk, session: DraftingSession
) -> None:
    session.open(1, SPEC, [6], tenant="a")
    session.open(2, SPEC, [7], tenant="a")
    session.outcome(2, 1, [5], rows({6: [8]}))
    assert draft(desk, session, Grant(2)).token_ids == (8,)


def test_the_tenants_of_long_ago_are_forgotten(
    desk: DraftingDesk, session: DraftingSession
) -> None:
    for number in range(MAX_TABLES):
        session.open(1, SPEC, [5], tenant=str(number))
        session.outcome(1, 1, [6], rows({6: [number]}))
    session.open(1, SPEC, [6], tenant="0")
    session.open(1, SPEC, [6], tenant="one more")
    session.open(1, SPEC, [6], tenant="0")
    assert draft(desk, session, Grant(2)).token_ids == (0,)
    session.open(1, SPEC, [6], tenant="1")
    assert draft(desk, session, Grant(2)).token_ids == ()


def test_a_row_may_repeat_itself_and_be_too_long(
    desk: DraftingDesk, session: DraftingSession
) -> None:
    session.open(1, SPEC, [5])
    session.outcome(1, 1, [6], rows({6: [7, 7, *range(8, 30)]}))
    assert draft(desk, session, Grant(3, branches=8, nodes=80)).token_ids == tuple(range(7, 15))


def test_nodes_go_where_rows_were_right(desk: DraftingDesk, session: DraftingSession) -> None:
    table = rows({6: [8, 9], 8: [10, 11], 9: [12, 13], 12: [14], 10: [15]})
    session.open(1, SPEC, [5])
    session.outcome(1, 1, [6], table)
    before = draft(desk, session, Grant(5, branches=2, nodes=3))
    assert (before.token_ids, before.parents) == ((8, 9, 10), (0, 0, 1))
    # Second choices turn out to be the right ones: what follows them is worth more now.
    for position in range(2, 120):
        session.outcome(1, position, [20 + position % 2], rows({20: [3, 21], 21: [3, 20]}))
    session.outcome(1, 120, [6], table)
    after = draft(desk, session, Grant(124, branches=2, nodes=3))
    assert (after.token_ids, after.parents) == ((9, 13, 8), (0, 1, 0)), "best first"


@pytest.mark.parametrize("branches", [1, 2])
def test_by_cost_only_candidates_that_are_worth_their_place(
    desk: DraftingDesk, session: DraftingSession, branches: int
) -> None:
    table = rows({6: [8, 9], 8: [10, 11], 10: [12, 13], 12: [14]})
    sizes = []
    for price in (0.0, 0.04, 0.2, 0.9):
        session.open(1, SPEC, [5], stopping=Stopping.COST)
        session.outcome(1, 1, [6], table)
        grant = Grant(9, branches=branches, nodes=7, tokens_per_ms=price, step_ms_per_candidate=1.0)
        proposal = draft(desk, session, grant)
        sizes.append(len(proposal.token_ids))
        assert proposal.stopping_state["price"] == price
        assert len(proposal.token_ids) == 1 or proposal.stopping_state["gain"] >= price
    assert sizes == {1: [4, 2, 1, 1], 2: [7, 3, 1, 1]}[branches]

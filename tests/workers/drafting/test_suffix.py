"""Suffix drafts: the longest match, what agrees, a tenant's answers, and what is learned."""

from __future__ import annotations

from random import Random

import pytest

from paceline.options import Stopping
from paceline.sampling import SamplingParams, SequenceSpec
from workers.drafting.desk import DraftingDesk, DraftingSession
from workers.drafting.kinds import suffix
from workers.drafting.kinds.suffix import (
    MAX_COMMON,
    MAX_OCCURRENCES,
    MAX_TENANTS,
    OWN_RUNS,
    FoundText,
    SuffixProposer,
)
from workers.drafting.proposal import Proposal
from workers.drafting.tree import Grant
from workers.verification.candidates import CandidateTree

SPEC = SequenceSpec(SamplingParams(), seed=0, prompt_length=1, end_token_ids=(99,))
ANSWER = [11, 12, 13, 14, 15, 16]


@pytest.fixture
def desk() -> DraftingDesk:
    return DraftingDesk(SuffixProposer(), max_sequences=100)


@pytest.fixture
def session(desk: DraftingDesk) -> DraftingSession:
    return desk.open_session(driver="a")


def draft(desk: DraftingDesk, session: DraftingSession, grant: Grant) -> Proposal:
    """The proposal for sequence 1 after a grant."""
    session.grant(1, grant)
    (news,) = desk.run_pass()
    desk.check_integrity()
    assert not desk.has_work
    (proposal,) = news.proposals
    return proposal


@pytest.mark.parametrize("seed", range(50))
def test_occurrences_are_those_of_the_longest_run_that_occurs(seed: int) -> None:
    random = Random(seed)
    text = [random.randrange(3) for _ in range(60)]
    found = FoundText(OWN_RUNS)
    for first in range(0, 60, 7):
        found.add(text[first : first + 7])

    def common(position: int) -> int:
        length = 0
        while (
            length < min(position, MAX_COMMON) and text[position - 1 - length] == text[-1 - length]
        ):
            length += 1
        return length

    at_least = next(one for one in (4, 2, 1, 0) if any(common(p) >= one for p in range(1, 60)))
    expected = [(common(p), p) for p in range(59, 0, -1) if common(p) >= at_least > 0]
    assert found.occurrences(text[-MAX_COMMON:]) == expected[:MAX_OCCURRENCES]


def test_the_longest_match_wins_over_the_newest(
    desk: DraftingDesk, session: DraftingSession
) -> None:
    #                 1 2 3 4 5 -> 7            0 3 4 5 -> 8       at last: 1 2 3 4 5
    session.open(1, SPEC, [1, 2, 3, 4, 5, 7, 6, 0, 3, 4, 5, 8, 9, 1, 2, 3, 4, 5])
    assert draft(desk, session, Grant(20)).token_ids == (7, 6)


def test_what_most_occurrences_agree_on_comes_first_and_the_rest_are_branches(
    desk: DraftingDesk, session: DraftingSession
) -> None:
    text = [1, 2, 7, 1, 2, 7, 1, 2, 7, 1, 2, 8, 1, 2]
    session.open(1, SPEC, text)
    assert draft(desk, session, Grant(len(text) + 1)).token_ids == (7,)
    session.open(1, SPEC, text)
    proposal = draft(desk, session, Grant(len(text) + 2, branches=2, nodes=4))
    tree = CandidateTree(proposal.token_ids, proposal.parents)
    assert [tree.token_ids[child - 1] for child in range(1, 5) if tree.parents[child - 1] == 0] == [
        7,
        8,
    ]
    assert proposal.last


def test_answers_help_later_requests_of_their_tenant_alone(desk: DraftingDesk) -> None:
    here, elsewhere = desk.open_session(driver="a"), desk.open_session(driver="b")
    here.open(1, SPEC, [5, 6, 7], tenant="x")
    here.outcome(1, 3, ANSWER)
    here.close(1)
    for session, tenant, expected in [
        (here, "x", (13, 14, 15)),
        (here, "y", ()),
        (elsewhere, "x", ()),  # Another driver's tenant of that name.
    ]:
        session.open(1, SPEC, [8, 7, 11, 12][1:], tenant=tenant)
        assert draft(desk, session, Grant(6)).token_ids == expected, tenant
        session.close(1)
    here.open(1, SPEC, [7, 11, 12], tenant="x", vocab_size=14)
    assert draft(desk, here, Grant(6)).token_ids == (), "another vocabulary"


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "MAX_RECENT", 64)
    proposer = SuffixProposer()
    desk = DraftingDesk(proposer, max_sequences=4)
    session = desk.open_session()
    for number in range(2 * MAX_TENANTS):
        session.open(1, SPEC, [5], tenant=str(number))
        session.outcome(1, 1, list(range(200)))
        session.close(1)
        desk.check_integrity()  # At most two generations of MAX_RECENT for MAX_TENANTS.
    # What is oldest goes first: the newest answer is still there.
    session.open(1, SPEC, [150, 151, 152], tenant=str(2 * MAX_TENANTS - 1))
    assert draft(desk, session, Grant(5)).token_ids == (153, 154)


def test_a_candidate_that_is_not_worth_its_price_ends_the_draft(
    desk: DraftingDesk, session: DraftingSession
) -> None:
    # After 1 2 came 7, 8, 9: each is right in one of three cases.
    text = [1, 2, 7, 4, 1, 2, 8, 5, 1, 2, 9, 6, 1, 2]
    cheap = Grant(18, tokens_per_ms=1.0, step_ms_per_candidate=0.001)
    dear = Grant(18, tokens_per_ms=1.0, step_ms_per_candidate=0.3)
    session.open(1, SPEC, text, stopping=Stopping.COST)
    assert len(draft(desk, session, cheap).token_ids) == 4
    session.open(1, SPEC, text, stopping=Stopping.COST)
    proposal = draft(desk, session, dear)
    assert len(proposal.token_ids) == 1
    assert proposal.last
    assert proposal.stopping_state["price"] == pytest.approx(0.3)


@pytest.mark.parametrize("seed", range(20))
def test_drafts_continue_after_any_outcomes(seed: int) -> None:
    """Chains and trees, agreement and divergence: the state always fits the tree."""
    random = Random(seed)
    desk = DraftingDesk(SuffixProposer(), max_sequences=2)
    session = desk.open_session()
    text = [random.randrange(4) for _ in range(20)]
    session.open(1, SPEC, text)
    num_accepted = 0
    for _ in range(40):
        nodes, branches = random.randrange(1, 9), random.choice([1, 1, 3])
        until = len(text) + random.randrange(1, 9)
        session.grant(1, Grant(until, branches=branches, nodes=nodes))
        while desk.has_work:
            desk.run_pass()
            desk.check_integrity()
        tree, node, path = session.trees[1], 0, []
        while tree.children(node) and random.random() < 0.7:
            node = random.choice(list(tree.children(node)))
            path.append(tree.tokens[node])
        num_accepted += len(path)
        new = [*path, random.randrange(4)]
        session.outcome(1, len(text), new)
        text += new
        desk.check_integrity()
    assert num_accepted > 0

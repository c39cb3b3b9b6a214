"""What a model drafter does with a grant: its nodes, the last of them, and when it stops."""

from __future__ import annotations

import pytest

from paceline.options import Stopping
from paceline.sampling import SamplingParams, SequenceSpec
from tests.workers.drafting.mirror import (
    RULES,
    VOCAB_SIZE,
    FreshDrafter,
)
from workers.drafting.desk import DraftingDesk, DraftingSession
from workers.drafting.draft_stopping import AdaEdl
from workers.drafting.kinds.model.proposer import ModelProposer
from workers.drafting.proposal import Proposal
from workers.drafting.tree import ROOT, Grant
from workers.engine.cpu.engine import CpuEngine
from workers.verification.draws import (
    top_children,
)


def _drafted(session: DraftingSession, desk: DraftingDesk) -> list[Proposal]:
    proposals = []
    while desk.has_work:
        for news in desk.run_pass():
            proposals += news.proposals
    return proposals


@pytest.mark.parametrize("rule", RULES)
def test_a_grant_of_nodes_is_spent_and_said_to_be(engine: CpuEngine, rule: str) -> None:
    spec = SequenceSpec(SamplingParams(), seed=5, prompt_length=3, rule=rule)
    desk = DraftingDesk(ModelProposer(engine), max_sequences=1)
    session = desk.open_session()
    session.open(1, spec, [5, 6, 7])
    branches = 1 if rule == "rejection" else 2
    depth = 4 if rule == "kseq" else 8
    session.grant(1, Grant(3 + depth, branches=branches, nodes=8))
    proposals = _drafted(session, desk)
    num_nodes = session.trees[1].num_nodes
    assert num_nodes <= 8
    assert num_nodes == 8 or rule == "kseq", "only equal paths may leave nodes over"
    assert [one.last for one in proposals] == [False] * (len(proposals) - 1) + [True]
    desk.close_session(session)


def test_more_nodes_may_be_granted_after_the_last(engine: CpuEngine) -> None:
    spec = SequenceSpec(SamplingParams(), seed=5, prompt_length=1)
    desk = DraftingDesk(ModelProposer(engine), max_sequences=1)
    session = desk.open_session()
    session.open(1, spec, [5])
    session.grant(1, Grant(9, branches=2, nodes=3))
    assert _drafted(session, desk)[-1].last
    session.grant(1, Grant(9, branches=2, nodes=3))
    assert not desk.has_work
    session.grant(1, Grant(9, branches=2, nodes=5))
    assert _drafted(session, desk)[-1].last
    assert session.trees[1].num_nodes == 5
    desk.close_session(session)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("stopping", [Stopping.ADAEDL, Stopping.CONFIDENCE, Stopping.COST])
def test_stopping_rules_stop_and_show_their_state(
    engine: CpuEngine, rule: str, stopping: Stopping
) -> None:
    spec = SequenceSpec(SamplingParams(), seed=1, prompt_length=1, rule=rule)
    desk = DraftingDesk(ModelProposer(engine), max_sequences=1)
    session = desk.open_session()
    session.open(1, spec, [5], stopping=stopping)
    branches = 1 if rule == "rejection" else 2
    # So dear that the cost rule refuses everything but what it must draft.
    dear = Grant(65, branches=branches, nodes=64, tokens_per_ms=1.0, step_ms_per_candidate=9.0)
    session.grant(1, dear)
    proposals = _drafted(session, desk)
    assert proposals[-1].last
    assert proposals[0].stopping_state
    assert not any(one.stopping_state for one in proposals[1:]), "told once after an outcome"
    if stopping is Stopping.COST:
        assert 1 <= session.trees[1].num_nodes <= branches
    assert session.trees[1].num_nodes < 64
    session.outcome(1, 1, [proposals[0].token_ids[0], 9])
    proposals = _drafted(session, desk)
    assert proposals[-1].last, "drafting begins anew after an outcome"
    assert proposals[0].stopping_state
    desk.close_session(session)


def test_a_rule_that_a_drafter_cannot_serve_is_declined_by_name(engine: CpuEngine) -> None:
    spec = SequenceSpec(SamplingParams(), seed=1, prompt_length=1, rule="one-hot")
    session = DraftingDesk(ModelProposer(engine), max_sequences=1).open_session()
    declined = session.open(1, spec, [5])
    assert declined is not None
    assert declined.for_good
    assert "'model'" in declined.reason
    assert "'one-hot'" in declined.reason


def test_nodes_go_where_candidates_were_accepted(engine: CpuEngine, fresh: FreshDrafter) -> None:
    """A drafter whose first candidate is always right ends up spending all its nodes on depth."""
    spec = SequenceSpec(SamplingParams(), seed=5, prompt_length=1)
    desk = DraftingDesk(ModelProposer(engine), max_sequences=1)
    session = desk.open_session()
    text = [5]
    session.open(1, spec, text)
    depths = []
    for _ in range(30):
        session.grant(1, Grant(len(text) + 8, branches=3, nodes=8))
        _drafted(session, desk)
        tree = session.trees[1]
        depths.append(max(tree.depth(node) for node in range(tree.num_nodes + 1)))
        right = top_children(fresh.logits(tuple(text)), spec, text, 1)
        session.outcome(1, len(text), right)
        text += right
    assert depths[0] < depths[-1]
    assert depths[-1] >= 7
    desk.close_session(session)


def test_a_subtree_that_agrees_stays_and_is_not_fed_again(engine: CpuEngine) -> None:
    spec = SequenceSpec(SamplingParams(), seed=5, prompt_length=1, rule="recursive")
    desk = DraftingDesk(ModelProposer(engine), max_sequences=1)
    session = desk.open_session()
    session.open(1, spec, [5])
    session.grant(1, Grant(9, branches=2, nodes=14))
    _drafted(session, desk)
    tree = session.trees[1]
    # A second child that was fed: its slot is not that of its position.
    chosen = next((c for c in tree.children(ROOT)[1:] if tree.children(c)), None)
    assert chosen is not None
    below = [tree.tokens[child] for child in tree.children(chosen)]
    session.outcome(1, 1, [tree.tokens[chosen]])
    assert [tree.tokens[child] for child in tree.children(ROOT)] == below
    desk.check_integrity()
    session.grant(1, Grant(9, branches=2, nodes=tree.num_nodes + 2))
    (news,) = desk.run_pass()
    assert news.tokens_fed == 1, "one leaf, and nothing of what was fed before"
    desk.close_session(session)


def test_adaedl_counts_what_was_verified(engine: CpuEngine) -> None:
    """While drafting is free, what was drafted during a step was in no window."""
    spec = SequenceSpec(SamplingParams(temperature=0.0), seed=1, prompt_length=1)
    rates = []
    for free in (False, True):
        proposer = ModelProposer(engine)
        desk = DraftingDesk(proposer, max_sequences=1)
        session = desk.open_session()
        session.open(1, spec, [5], stopping=Stopping.ADAEDL)
        (rule,) = (held.growth._stopper.rule for held in proposer._held.values())
        assert isinstance(rule, AdaEdl)
        rule.threshold = -9.0  # It never stops: the tiny model is sure of nothing.
        session.grant(1, Grant(5, nodes=4, drafting_is_free=free))
        _drafted(session, desk)
        tree = session.trees[1]
        session.outcome(1, 1, tree.tokens[1:2])
        assert rule.acceptance_rate == pytest.approx(0.95), "one of one"
        # Three nodes are there when the step begins; three more come while it runs.
        session.grant(1, Grant(8, nodes=6, drafting_is_free=free))
        _drafted(session, desk)
        assert tree.num_nodes == 6
        session.outcome(1, 2, [*tree.tokens[1:3], (tree.tokens[3] + 1) % VOCAB_SIZE])
        rates.append(rule.acceptance_rate)
        desk.close_session(session)
    assert rates == pytest.approx([0.475 + 0.5 * 2 / 6, 0.475 + 0.5 * 2 / 3])

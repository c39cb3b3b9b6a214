"""Trees of the model drafter in random schedules, as a driver sees them from messages alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.prefix_hash import hash_prefix
from paceline.rules import Rule, Stopping
from paceline.sampling import SamplingParams, SequenceSpec
from tests.tiny import make_tiny_checkpoint
from workers.drafting.desk import DraftingDesk, DraftingSession, Proposal
from workers.drafting.model import ModelProposer
from workers.drafting.tree import ROOT, Grant
from workers.engine.engine import Engine, Slice
from workers.verification.candidates import CandidateTree
from workers.verification.draft_probs import DraftProbs, SparseProbs
from workers.verification.draws import (
    cut_draft_probs,
    draw_independent,
    draw_without_replacement,
    top_children,
)
from workers.verification.rules import check_proposal

VOCAB_SIZE = 320
MAX_LEN = 160
BLOCK_BYTES = 2 * 2 * 2 * 128 * 8 * 4  # layers, keys and values, heads, positions, size, float32
MOST_BRANCHES = 4
RULES = (Rule.COUPLED, Rule.REJECTION, Rule.KSEQ, Rule.RECURSIVE, Rule.MCSD)


class FreshDrafter:
    """What a drafter without any history computes for a prefix."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def logits(self, prefix: tuple[int, ...]) -> torch.Tensor:
        if prefix not in self._known:
            self._known[prefix] = self._engine.step([Slice((0, 1), 0, list(prefix), 1)])[0]
        return self._known[prefix]


@dataclass(eq=False)
class _Node:
    token_id: int
    prefix: tuple[int, ...]
    distribution: SparseProbs | None = None
    multiplicity: int = 1
    children: list[_Node] = field(default_factory=list)

    def all_below(self) -> list[_Node]:
        return [one for child in self.children for one in (child, *child.all_below())]


class _Mirror:
    """One sequence as a driver knows it: its tree, built from proposals by content."""

    def __init__(self, spec: SequenceSpec, token_ids: Sequence[int], fresh: FreshDrafter) -> None:
        self.spec = spec
        self.fresh = fresh
        self.root = _Node(token_ids[-1], tuple(token_ids))
        self.grant = Grant()
        self.told_last = False
        self.max_branches = 1

    def commit(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self.root = next(
                (child for child in self.root.children if child.token_id == token_id),
                _Node(token_id, (*self.root.prefix, token_id)),
            )
        self.told_last = False

    def take(self, proposal: Proposal) -> None:
        assert not self.told_last, "more came after `last`"
        self.told_last = proposal.last
        tree = CandidateTree(
            proposal.token_ids,
            proposal.parents or tuple(range(len(proposal.token_ids))),
            proposal.multiplicities,
        )
        pairs = DraftProbs(proposal.distributions) if proposal.distributions else None
        check_proposal(self.spec.rule, tree, pairs, vocab_size=VOCAB_SIZE, max_nodes=1024)
        base = self._base(proposal)
        places = [base]
        used: set[int] = set()
        num_new = 0
        for index, token_id in enumerate(proposal.token_ids):
            parent = places[tree.parents[index]]
            node = next(
                (c for c in parent.children if c.token_id == token_id and id(c) not in used), None
            )
            if node is None:
                node = _Node(token_id, (*parent.prefix, token_id))
                node.multiplicity = tree.multiplicities[index]
                parent.children.append(node)
                self._check_place(node, parent)
                num_new += 1
            assert node.multiplicity == tree.multiplicities[index]
            used.add(id(node))
            places.append(node)
        for number, kept in proposal.distributions.items():
            places[number].distribution = kept
        assert num_new or proposal.last
        if num_new:
            most = self.grant.nodes or self.grant.until_position - len(self.root.prefix)
            assert len(self.root.all_below()) <= most, "more nodes than granted"

    def _base(self, proposal: Proposal) -> _Node:
        for node in (self.root, *self.root.all_below()):
            same_length = len(node.prefix) == proposal.base_length
            if same_length and hash_prefix(node.prefix) == proposal.base_hash:
                return node
        raise AssertionError("a base that is nowhere in the tree")

    def _check_place(self, node: _Node, parent: _Node) -> None:
        assert len(node.prefix) <= min(self.grant.until_position, MAX_LEN), "beyond the grant"
        follows_output = len(parent.prefix) > self.spec.prompt_length
        assert not (follows_output and parent.token_id in self.spec.end_token_ids)

    def check(self) -> None:
        """All children are the draws of a drafter without any history."""
        for node in (self.root, *self.root.all_below()):
            if node.children:
                self._check_children(node)

    def _check_children(self, node: _Node) -> None:
        spec, tokens = self.spec, [child.token_id for child in node.children]
        logits_V = self.fresh.logits(node.prefix)
        if spec.rule is Rule.COUPLED:
            # One more: a tree's sums are made in another order, and may turn a tie.
            best = top_children(logits_V, spec, node.prefix, self.max_branches + 1)
            assert set(tokens) <= set(best)
            assert len(set(tokens)) == len(tokens)
            return
        kept, sent = cut_draft_probs(logits_V, spec, node.prefix), node.distribution
        assert sent is not None
        for token_id, prob in zip(sent.token_ids_M.tolist(), sent.probs_M.tolist(), strict=True):
            assert abs(kept.exact().prob_of(token_id) - prob) < 1e-3
        position = len(node.prefix)
        if spec.rule is Rule.KSEQ:
            drawn = draw_independent(sent, spec, position, range(self.max_branches))
            assert set(tokens) <= set(drawn)
            for child in node.children:
                assert child.multiplicity <= drawn.count(child.token_id)
        elif spec.rule is Rule.RECURSIVE:
            drawn = draw_without_replacement(sent, spec, position, len(tokens))
            assert tuple(tokens) == drawn
        else:
            assert tuple(tokens) == draw_independent(sent, spec, position, range(len(tokens)))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"), vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_LEN
    )


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Engine:
    # Four blocks for two sequences of up to two and their trees: the pool is full at times.
    return Engine(checkpoint, threads=1, kv_memory_bytes=4 * BLOCK_BYTES)


@pytest.fixture(scope="module")
def fresh(checkpoint: Path) -> FreshDrafter:
    return FreshDrafter(Engine(checkpoint, threads=1, kv_memory_bytes=2 * BLOCK_BYTES))


def _spec(random: Random, rule: Rule, prompt_length: int) -> SequenceSpec:
    sampling = random.choice(
        [
            SamplingParams(temperature=0.0),
            SamplingParams(temperature=0.7, top_k=3),
            SamplingParams(temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.5),
        ]
    )
    ends = random.choice([(), tuple(range(0, VOCAB_SIZE, 5))])
    return SequenceSpec(sampling, random.randrange(3), prompt_length, end_token_ids=ends, rule=rule)


ACTIONS = {"pass": 20, "outcome": 5, "grant": 5, "open": 0.4, "close": 0.2}


def _run_schedule(engine: Engine, fresh: FreshDrafter, random: Random) -> None:
    desk = DraftingDesk(ModelProposer(engine), max_sequences=2)
    session = desk.open_session()
    mirrors: dict[int, _Mirror] = {}
    for _ in range(80):
        sequence_id = random.randrange(2)
        mirror = mirrors.get(sequence_id)
        (action,) = random.choices(list(ACTIONS), list(ACTIONS.values()))
        if action == "open" or mirror is None:
            _open(fresh, random, session, mirrors, sequence_id)
        elif action == "outcome":
            committed = _outcome(random, mirror)
            session.outcome(sequence_id, len(mirror.root.prefix), committed)
            mirror.commit(committed)
        elif action == "grant":
            _grant(random, session, sequence_id, mirror)
        elif action == "close":
            session.close(sequence_id)
            del mirrors[sequence_id]
        elif desk.has_work:
            _run_pass(random, desk, mirrors)
        desk.check_integrity()
    for _ in range(200):
        if desk.has_work:
            _run_pass(random, desk, mirrors)
            desk.check_integrity()
    assert not desk.has_work, "passes go on for ever"
    for mirror in mirrors.values():
        mirror.check()
    desk.close_session(session)
    desk.check_integrity()


def _open(
    fresh: FreshDrafter,
    random: Random,
    session: DraftingSession,
    mirrors: dict[int, _Mirror],
    sequence_id: int,
) -> None:
    length = random.choice([1, 2, 9, 33, 120, 126, MAX_LEN - 4])
    prompt = [random.randrange(VOCAB_SIZE) for _ in range(length)]
    spec = _spec(random, random.choice(RULES), length)
    stopping = random.choice([Stopping.FIXED, *Stopping])
    mirrors.pop(sequence_id, None)
    if session.open(sequence_id, spec, prompt, stopping=stopping) is None:
        mirrors[sequence_id] = _Mirror(spec, prompt, fresh)


def _grant(random: Random, session: DraftingSession, sequence_id: int, mirror: _Mirror) -> None:
    branches = 1 if mirror.spec.rule is Rule.REJECTION else random.randint(1, MOST_BRANCHES)
    if mirror.max_branches > 1:
        branches = random.choice([branches, mirror.max_branches])
    grant = Grant(
        until_position=len(mirror.root.prefix) + random.choice([0, 1, 3, 6, 9, 12]),
        branches=branches,
        nodes=random.choice([0, 1, 4, 9, 20, 40]),
        tokens_per_ms=random.choice([0.0, 0.01, 1.0]),
        step_ms_per_candidate=random.choice([0.0, 0.5]),
        drafting_is_free=random.random() < 0.5,
    )
    mirror.grant = grant
    mirror.told_last = False
    mirror.max_branches = max(mirror.max_branches, branches)
    session.grant(sequence_id, grant)


def _outcome(random: Random, mirror: _Mirror) -> list[int]:
    """A way down the tree, then perhaps something else."""
    node, tokens = mirror.root, []
    while node.children and random.random() < 0.7:
        node = random.choice(node.children)
        tokens.append(node.token_id)
    others = random.choice([0, 1, 1, 2]) if tokens else 1
    return tokens + [random.randrange(VOCAB_SIZE) for _ in range(others)]


def _run_pass(random: Random, desk: DraftingDesk, mirrors: dict[int, _Mirror]) -> None:
    for news in desk.run_pass():
        for proposal in news.proposals:
            mirrors[proposal.sequence_id].take(proposal)
            mirrors[proposal.sequence_id].check()
        for declined, reason in news.declined:
            assert reason
            del mirrors[declined]
    desk.pass_took(random.random() * 10)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_trees_are_what_a_fresh_drafter_would_draw(
    engine: Engine, fresh: FreshDrafter, seed: int
) -> None:
    _run_schedule(engine, fresh, Random(seed))


def _drafted(session: DraftingSession, desk: DraftingDesk) -> list[Proposal]:
    proposals = []
    while desk.has_work:
        for news in desk.run_pass():
            proposals += news.proposals
    return proposals


@pytest.mark.parametrize("rule", RULES)
def test_a_grant_of_nodes_is_spent_and_said_to_be(engine: Engine, rule: Rule) -> None:
    spec = SequenceSpec(SamplingParams(), seed=5, prompt_length=3, rule=rule)
    desk = DraftingDesk(ModelProposer(engine), max_sequences=1)
    session = desk.open_session()
    session.open(1, spec, [5, 6, 7])
    branches = 1 if rule is Rule.REJECTION else 2
    depth = 4 if rule is Rule.KSEQ else 8
    session.grant(1, Grant(3 + depth, branches=branches, nodes=8))
    proposals = _drafted(session, desk)
    num_nodes = session.trees[1].num_nodes
    assert num_nodes <= 8
    assert num_nodes == 8 or rule is Rule.KSEQ, "only equal paths may leave nodes over"
    assert [one.last for one in proposals] == [False] * (len(proposals) - 1) + [True]
    desk.close_session(session)


def test_more_nodes_may_be_granted_after_the_last(engine: Engine) -> None:
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
    engine: Engine, rule: Rule, stopping: Stopping
) -> None:
    spec = SequenceSpec(SamplingParams(), seed=1, prompt_length=1, rule=rule)
    desk = DraftingDesk(ModelProposer(engine), max_sequences=1)
    session = desk.open_session()
    session.open(1, spec, [5], stopping=stopping)
    branches = 1 if rule is Rule.REJECTION else 2
    # So dear that the cost rule refuses everything but what it must draft.
    dear = Grant(65, branches=branches, nodes=64, tokens_per_ms=1.0, step_ms_per_candidate=9.0)
    session.grant(1, dear)
    proposals = _drafted(session, desk)
    assert proposals[-1].last
    assert all(one.stopping_state for one in proposals if one.token_ids)
    if stopping is Stopping.COST:
        assert 1 <= session.trees[1].num_nodes <= branches
    assert session.trees[1].num_nodes < 64
    session.outcome(1, 1, [proposals[0].token_ids[0], 9])
    assert _drafted(session, desk)[-1].last, "drafting begins anew after an outcome"
    desk.close_session(session)


def test_a_rule_that_a_drafter_cannot_serve_is_declined_by_name(engine: Engine) -> None:
    spec = SequenceSpec(SamplingParams(), seed=1, prompt_length=1, rule=Rule.ONE_HOT)
    session = DraftingDesk(ModelProposer(engine), max_sequences=1).open_session()
    reason = session.open(1, spec, [5]) or ""
    assert "'model'" in reason
    assert "'one-hot'" in reason


def test_nodes_go_where_candidates_were_accepted(engine: Engine, fresh: FreshDrafter) -> None:
    """A drafter whose first candidate is always right comes to spend all its nodes on depth."""
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


def test_a_subtree_that_agrees_stays_and_is_not_fed_again(engine: Engine) -> None:
    spec = SequenceSpec(SamplingParams(), seed=5, prompt_length=1, rule=Rule.RECURSIVE)
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

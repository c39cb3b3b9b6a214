"""Every rule that tosses coins commits the target's law: exactly, by enumeration.

Each broken variant below is rejected by the same check.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.workers.verification.enumeration import (
    KINDS,
    Coins,
    Draft,
    NodeOf,
    Prefix,
    Shape,
    TinyModels,
    committed_law,
    drawn_paths,
    drawn_trees,
    is_exact,
    rule_node,
)
from workers.verification.candidates import CandidateTree, merge_paths
from workers.verification.draft_probs import DraftDistribution, DraftProbs, SparseProbs
from workers.verification.kseq import KSeqNode, accepted_mass, smallest_ratio, some_accepted
from workers.verification.one_hot import OneHotNode
from workers.verification.rejection import RecursiveNode
from workers.verification.rules import Rule
from workers.verification.walk import Node

SIZES = [(v, k) for v in (3, 4, 5) for k in (1, 2, 3, 4)]

PAIR_OF_PAIRS: Shape = (((), ()), ((), ()))
SPINE: Shape = ((((), ()), ()), ())  # two children thrice, always under the first
FORK: Shape = (((),), (((),),))  # one child each, to depth 2 and 3
SHAPES = {"pair of pairs": PAIR_OF_PAIRS, "spine": SPINE, "fork": FORK}


def _chains(models: TinyModels, length: int) -> Iterator[Draft]:
    for path, prob in drawn_paths(models, length):
        yield CandidateTree.chain(path), prob


def _merged(models: TinyModels, num_paths: int, depth: int) -> Iterator[Draft]:
    """Trees of independent paths, each order of drawing apart."""
    for drawn in itertools.product(drawn_paths(models, depth), repeat=num_paths):
        yield merge_paths([path for path, _ in drawn]), math.prod(prob for _, prob in drawn)


def _merged_unordered(models: TinyModels, num_paths: int) -> Iterator[Draft]:
    """Depth 1, equal multisets of draws taken once."""
    for drawn in itertools.combinations_with_replacement(drawn_paths(models, 1), num_paths):
        counts = Counter(path for path, _ in drawn).values()
        orders = math.factorial(num_paths) / math.prod(math.factorial(n) for n in counts)
        yield (
            merge_paths([path for path, _ in drawn]),
            orders * math.prod(prob for _, prob in drawn),
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 2, 3])
def test_rejection(kind: str, length: int) -> None:
    """Chains over 3 to 5 tokens, with the bonus."""
    for vocab_size in (3, 4, 5) if length < 3 else (3,):
        models = TinyModels(vocab_size, kind)
        chains = _chains(models, length)
        assert is_exact(
            models, committed_law(models, chains, length + 1, rule_node(Rule.REJECTION))
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", [Rule.RECURSIVE, Rule.MCSD])
def test_recursive_at_one_position(rule: Rule, kind: str) -> None:
    """Up to 4 children of 3 to 5 tokens; with replacement all 625 orders of 4 of 5."""
    for vocab_size, num_children in SIZES:
        models = TinyModels(vocab_size, kind)
        shape: Shape = ((),) * num_children
        drafts = drawn_trees(models, shape, with_replacement=rule is Rule.MCSD)
        assert is_exact(models, committed_law(models, drafts, 1, rule_node(rule)))


@pytest.mark.parametrize("kind", ["random", "zeros", "one-hot draft", "equal"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", [Rule.RECURSIVE, Rule.MCSD])
def test_recursive_in_trees(rule: Rule, shape: str, kind: str) -> None:
    """3 tokens, up to 2 children, to depth 3, with the bonus after each leaf."""
    models = TinyModels(3, kind)
    drafts = drawn_trees(models, SHAPES[shape], with_replacement=rule is Rule.MCSD)
    assert is_exact(models, committed_law(models, drafts, 3, rule_node(rule)))


@pytest.mark.parametrize("kind", KINDS)
def test_kseq_at_one_position(kind: str) -> None:
    """Up to 4 draws of 3 to 5 tokens."""
    for vocab_size, num_paths in SIZES:
        models = TinyModels(vocab_size, kind)
        drafts = _merged_unordered(models, num_paths)
        law = committed_law(models, drafts, 1, rule_node(Rule.KSEQ), shuffled=True)
        assert is_exact(models, law)


@pytest.mark.parametrize("kind", ["random", "zeros", "one-hot draft", "equal"])
@pytest.mark.parametrize(("num_paths", "depth"), [(3, 1), (2, 2), (2, 3)])
def test_kseq_paths(num_paths: int, depth: int, kind: str) -> None:
    """Every order of drawing the paths of a tree, over 3 tokens."""
    models = TinyModels(3, kind)
    drafts = _merged(models, num_paths, depth)
    law = committed_law(models, drafts, depth + 1, rule_node(Rule.KSEQ), shuffled=True)
    assert is_exact(models, law)


@pytest.mark.parametrize("kind", ["random", "zeros", "one-hot target"])
def test_one_hot(kind: str) -> None:
    """Each tree alone has the law, so however it was chosen: all of 3 tokens, up to 4 nodes."""
    models = TinyModels(3, kind)
    for parents in [(0,), (0, 0), (0, 0, 0), (0, 1), (0, 1, 2), (0, 0, 1, 1), (0, 0, 2, 3)]:
        for token_ids in itertools.product(range(3), repeat=len(parents)):
            siblings = list(zip(parents, token_ids, strict=True))
            if len(set(siblings)) == len(siblings):
                tree = CandidateTree(token_ids, parents)
                law = committed_law(models, [(tree, 1.0)], 3, rule_node(Rule.ONE_HOT))
                assert is_exact(models, law)
    models = TinyModels(5, kind)
    for token_ids in itertools.permutations(range(5), 4):
        tree = CandidateTree(token_ids, (0,) * 4)
        assert is_exact(models, committed_law(models, [(tree, 1.0)], 1, rule_node(Rule.ONE_HOT)))


# Acceptance is what the papers say.


@pytest.mark.parametrize("kind", KINDS)
def test_acceptance_rates(kind: str) -> None:
    """Rejection: 1 - TV. k-SEQ: 1 - (1 - b)^K with the ratio where that is r b."""
    models = TinyModels(5, kind)
    target_V, draft = models.target_V(()), models.draft(()).exact()
    draft_V = np.zeros(5)
    draft_V[draft.token_ids_M] = draft.probs_M
    overlap = np.minimum(target_V, draft_V).sum()
    node = RecursiveNode(target_V, draft, with_replacement=False)
    rate = sum(draft.prob_of(t) * node.acceptance(t) for t in draft.token_ids_M.tolist())
    assert rate == pytest.approx(overlap, abs=1e-12)
    previous = overlap
    for num_draws in (1, 2, 3, 4):
        target_M = target_V[draft.token_ids_M]
        ratio = smallest_ratio(target_M, draft.probs_M, num_draws)
        assert 1 <= ratio <= num_draws
        one = float(accepted_mass(target_M, draft.probs_M, ratio).sum())
        some = some_accepted(one, num_draws)
        assert some == pytest.approx(1 - (1 - one) ** num_draws, abs=1e-12)
        assert some == pytest.approx(ratio * one, abs=1e-5)  # the bisection's tolerance
        assert some >= previous - 1e-5, "another draw may not lower the acceptance"
        previous = some


# Negative controls.


def _dense(pairs: DraftDistribution, size: int) -> NDArray[np.float64]:
    probs_V = np.zeros(size)
    probs_V[pairs.token_ids_M] = pairs.probs_M
    return probs_V


def _swapped(rule: Rule) -> NodeOf:
    """Broken: the target's probabilities taken for the drafter's, and the other way round."""

    def node_of(
        target_V: NDArray[np.float64], draft_probs: DraftProbs, node: int, num_tests: int
    ) -> Node:
        draft_V = _dense(draft_probs.of_node[node].exact(), target_V.size)
        swapped = SparseProbs(np.arange(target_V.size), target_V.astype(np.float32))
        return rule_node(rule)(draft_V, DraftProbs({node: swapped}), node, num_tests)

    return node_of


@dataclass(frozen=True)
class _NotRenormalised:
    """Broken: what is left after a refusal keeps its smaller sum."""

    left_V: NDArray[np.float64]
    draft: DraftDistribution | None

    def acceptance(self, token_id: int) -> float:
        draft_prob = 1.0 if self.draft is None else self.draft.prob_of(token_id)
        return min(1.0, float(self.left_V[token_id]) / draft_prob)

    def refused(self, token_id: int) -> _NotRenormalised:
        if self.draft is None:
            left_V = self.left_V.copy()
            left_V[token_id] = 0
            return _NotRenormalised(left_V, None)
        left_V = np.maximum(self.left_V - _dense(self.draft, self.left_V.size), 0)
        return _NotRenormalised(left_V, self.draft.without(token_id))

    def residual_V(self) -> NDArray[np.float64]:
        return self.left_V


@dataclass
class _OneUniform(Coins):
    """Broken: one uniform for all tests. `low` to `high` is where the tests left it."""

    low: float = field(default=0.0)
    high: float = field(default=1.0)

    def restart(self) -> None:
        super().restart()
        self.low, self.high = 0.0, 1.0

    def accepts(self, depth: int, number: int, probability: float) -> bool:
        cut = min(max(probability, self.low), self.high)
        share = (cut - self.low) / (self.high - self.low)
        accepted = self.toss([share, 1 - share]) == 0
        self.low, self.high = (self.low, cut) if accepted else (cut, self.high)
        return accepted


def _in_order(models: TinyModels) -> NDArray[np.float64]:
    """Broken: merged draws tested in the order of their first appearance."""
    return committed_law(models, _merged(models, 3, 1), 1, rule_node(Rule.KSEQ))


def _two_children(models: TinyModels) -> Iterator[Draft]:
    return drawn_trees(models, ((), ()), with_replacement=False)


def _unlike_greedy(tokens: Prefix, models: TinyModels) -> bool:
    """A stop test that looks at the last drafted token."""
    return models.draft(tokens[:-1]).exact().prob_of(tokens[-1]) < 0.5


def _stopped(models: TinyModels, *, sends_the_last: bool) -> Iterator[Draft]:
    """Chains of at most 2 drafted with a stop test, which may drop what it looked at."""

    def grow(path: Prefix, prob: float) -> Iterator[Draft]:
        if len(path) == 2:
            yield CandidateTree.chain(path), prob
            return
        draft = models.draft(path).exact()
        for token_id, token_prob in zip(draft.token_ids_M.tolist(), draft.probs_M, strict=True):
            longer = (*path, token_id)
            if not _unlike_greedy(longer, models):
                yield from grow(longer, prob * token_prob)
            else:
                sent = longer if sends_the_last else path
                yield CandidateTree.chain(sent), prob * token_prob

    return grow((), 1.0)


BROKEN: dict[str, Callable[[TinyModels], NDArray[np.float64]]] = {
    "rejection, swapped": lambda m: committed_law(m, _chains(m, 1), 1, _swapped(Rule.REJECTION)),
    "recursive, swapped": lambda m: committed_law(m, _two_children(m), 1, _swapped(Rule.RECURSIVE)),
    "mcsd, swapped": lambda m: committed_law(
        m, drawn_trees(m, ((), ()), with_replacement=True), 1, _swapped(Rule.MCSD)
    ),
    "kseq, swapped": lambda m: committed_law(
        m, _merged(m, 2, 1), 1, _swapped(Rule.KSEQ), shuffled=True
    ),
    "rejection, one uniform": lambda m: committed_law(
        m, _chains(m, 2), 2, rule_node(Rule.REJECTION), coins_of=_OneUniform
    ),
    "recursive, one uniform": lambda m: committed_law(
        m,
        drawn_trees(m, ((), (), ()), with_replacement=False),
        1,
        rule_node(Rule.RECURSIVE),
        coins_of=_OneUniform,
    ),
    "kseq, one uniform": lambda m: committed_law(
        m, _merged(m, 2, 1), 1, rule_node(Rule.KSEQ), shuffled=True, coins_of=_OneUniform
    ),
    "one-hot, one uniform": lambda m: committed_law(
        m,
        [(CandidateTree((0, 1), (0, 0)), 1.0)],
        1,
        rule_node(Rule.ONE_HOT),
        coins_of=_OneUniform,
    ),
    "kseq, without replacement": lambda m: committed_law(
        m, _two_children(m), 1, rule_node(Rule.KSEQ), shuffled=True
    ),
    "kseq, deterministic": lambda m: committed_law(
        m, [(CandidateTree((0, 1), (0, 0)), 1.0)], 1, rule_node(Rule.KSEQ), shuffled=True
    ),
    "kseq, merged draws in a fixed order": _in_order,
    "mcsd, without replacement": lambda m: committed_law(
        m, _two_children(m), 1, rule_node(Rule.MCSD)
    ),
    "recursive, not renormalised": lambda m: committed_law(
        m,
        _two_children(m),
        1,
        lambda p, q, node, _: _NotRenormalised(p, q.of_node[node].exact()),
    ),
    "one-hot, not renormalised": lambda m: committed_law(
        m,
        [(CandidateTree((0, 1), (0, 0)), 1.0)],
        1,
        lambda p, q, node, _: _NotRenormalised(p, None),
    ),
    "rejection, the stop test drops its token": lambda m: committed_law(
        m, _stopped(m, sends_the_last=False), 3, rule_node(Rule.REJECTION)
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_broken_rules_are_noticed(broken: str) -> None:
    """Each by the check of the tests above, and by far more than rounding."""
    models = TinyModels(4, "other")
    law = BROKEN[broken](models)
    assert not is_exact(models, law)
    assert np.abs(law - models.law((), law.ndim)).max() > 1e-4


@pytest.mark.parametrize("kind", ["random", "other", "zeros"])
def test_a_stop_test_that_sends_what_it_looked_at_keeps_the_law(kind: str) -> None:
    """The sound variant of the control above."""
    models = TinyModels(3, kind)
    drafts = _stopped(models, sends_the_last=True)
    assert is_exact(models, committed_law(models, drafts, 3, rule_node(Rule.REJECTION)))


def test_edges_of_the_arithmetic() -> None:
    """Disjoint supports, p = q and certainty leave finite distributions that sum to 1."""
    target_V = np.array([0.5, 0.5, 0.0, 0.0])
    other = DraftDistribution(np.array([2, 3]), np.array([0.5, 0.5]))
    same = DraftDistribution(np.array([0, 1]), np.array([0.5, 0.5]))
    for draft in (other, same):
        for node in (
            RecursiveNode(target_V, draft, with_replacement=False),
            RecursiveNode(target_V, draft, with_replacement=True),
            KSeqNode.of(target_V, draft, 3),
            OneHotNode(np.array([0.0, 0.0, 1.0, 0.0])),
        ):
            left: Node = node
            for token_id in draft.token_ids_M.tolist():
                assert 0 <= left.acceptance(token_id) <= 1
                left = left.refused(token_id)
                assert left.residual_V().sum() == pytest.approx(1)
                assert (left.residual_V() >= 0).all()
                if isinstance(left, RecursiveNode) and not left.draft.probs_M.any():
                    break

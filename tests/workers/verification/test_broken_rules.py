"""Negative controls of test_laws.py: broken rules that its check rejects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.workers.verification.enumeration import (
    Coins,
    Draft,
    NodeOf,
    Prefix,
    TinyModels,
    committed_law,
    drawn_chains,
    drawn_trees,
    is_exact,
    merged_trees,
    rule_node,
)
from workers.verification.candidates import (
    CandidateTree,
    DraftProbs,
    SparseProbs,
)
from workers.verification.rule import DraftDistribution, RuleNode


def _dense(pairs: DraftDistribution, size: int) -> NDArray[np.float64]:
    probs_V = np.zeros(size)
    probs_V[pairs.token_ids_M] = pairs.probs_M
    return probs_V


def _swapped(rule: str) -> NodeOf:
    """Broken: target and draft probabilities are swapped."""

    def node_of(
        target_V: NDArray[np.float64], draft_probs: DraftProbs, node: int, num_tests: int
    ) -> RuleNode:
        draft_V = _dense(draft_probs.of_node[node].exact(), target_V.size)
        swapped = SparseProbs(np.arange(target_V.size), target_V.astype(np.float32))
        return rule_node(rule)(draft_V, DraftProbs({node: swapped}), node, num_tests)

    return node_of


@dataclass(frozen=True)
class _NotRenormalized:
    """Broken: what is left after a refusal keeps its smaller sum."""

    left_V: NDArray[np.float64]
    draft: DraftDistribution | None

    def acceptance(self, token_id: int) -> float:
        draft_prob = 1.0 if self.draft is None else self.draft.prob_of(token_id)
        return min(1.0, float(self.left_V[token_id]) / draft_prob)

    def refused(self, token_id: int) -> _NotRenormalized:
        if self.draft is None:
            left_V = self.left_V.copy()
            left_V[token_id] = 0
            return _NotRenormalized(left_V, None)
        left_V = np.maximum(self.left_V - _dense(self.draft, self.left_V.size), 0)
        return _NotRenormalized(left_V, self.draft.without(token_id))

    def residual_V(self) -> NDArray[np.float64]:
        return self.left_V


@dataclass
class _OneUniform(Coins):
    """Broken: one uniform for all tests. Earlier tests narrowed it to `low` to `high`."""

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
    """Broken: merged draws are tested in the order of their first appearance."""
    return committed_law(models, merged_trees(models, 3, 1), 1, rule_node("kseq"))


def _two_children(models: TinyModels) -> Iterator[Draft]:
    return drawn_trees(models, ((), ()), with_replacement=False)


def _is_unlikely(tokens: Prefix, models: TinyModels) -> bool:
    """A stop test that looks at the last drafted token."""
    return models.draft(tokens[:-1]).exact().prob_of(tokens[-1]) < 0.5


def _stopped(models: TinyModels, *, sends_the_last: bool) -> Iterator[Draft]:
    """Chains of at most 2 tokens, drafted with a stop test that may drop the token it looked at."""

    def grow(path: Prefix, prob: float) -> Iterator[Draft]:
        if len(path) == 2:
            yield CandidateTree.chain(path), prob
            return
        draft = models.draft(path).exact()
        for token_id, token_prob in zip(draft.token_ids_M.tolist(), draft.probs_M, strict=True):
            longer = (*path, token_id)
            if not _is_unlikely(longer, models):
                yield from grow(longer, prob * token_prob)
            else:
                sent = longer if sends_the_last else path
                yield CandidateTree.chain(sent), prob * token_prob

    return grow((), 1.0)


BROKEN: dict[str, Callable[[TinyModels], NDArray[np.float64]]] = {
    "rejection, swapped": lambda m: committed_law(m, drawn_chains(m, 1), 1, _swapped("rejection")),
    "recursive, swapped": lambda m: committed_law(m, _two_children(m), 1, _swapped("recursive")),
    "mcsd, swapped": lambda m: committed_law(
        m, drawn_trees(m, ((), ()), with_replacement=True), 1, _swapped("mcsd")
    ),
    "kseq, swapped": lambda m: committed_law(
        m, merged_trees(m, 2, 1), 1, _swapped("kseq"), shuffled=True
    ),
    "rejection, one uniform": lambda m: committed_law(
        m, drawn_chains(m, 2), 2, rule_node("rejection"), coins_of=_OneUniform
    ),
    "recursive, one uniform": lambda m: committed_law(
        m,
        drawn_trees(m, ((), (), ()), with_replacement=False),
        1,
        rule_node("recursive"),
        coins_of=_OneUniform,
    ),
    "kseq, one uniform": lambda m: committed_law(
        m, merged_trees(m, 2, 1), 1, rule_node("kseq"), shuffled=True, coins_of=_OneUniform
    ),
    "one-hot, one uniform": lambda m: committed_law(
        m,
        [(CandidateTree((0, 1), (0, 0)), 1.0)],
        1,
        rule_node("one-hot"),
        coins_of=_OneUniform,
    ),
    "kseq, without replacement": lambda m: committed_law(
        m, _two_children(m), 1, rule_node("kseq"), shuffled=True
    ),
    "kseq, deterministic": lambda m: committed_law(
        m, [(CandidateTree((0, 1), (0, 0)), 1.0)], 1, rule_node("kseq"), shuffled=True
    ),
    "kseq, merged draws in a fixed order": _in_order,
    "mcsd, without replacement": lambda m: committed_law(m, _two_children(m), 1, rule_node("mcsd")),
    "recursive, not renormalized": lambda m: committed_law(
        m,
        _two_children(m),
        1,
        lambda p, q, node, _: _NotRenormalized(p, q.of_node[node].exact()),
    ),
    "one-hot, not renormalized": lambda m: committed_law(
        m,
        [(CandidateTree((0, 1), (0, 0)), 1.0)],
        1,
        lambda p, q, node, _: _NotRenormalized(p, None),
    ),
    "rejection, the stop test drops its token": lambda m: committed_law(
        m, _stopped(m, sends_the_last=False), 3, rule_node("rejection")
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_broken_rules_are_noticed(broken: str) -> None:
    """The check of test_laws.py rejects each, by far more than rounding."""
    models = TinyModels(4, "other")
    law = BROKEN[broken](models)
    assert not is_exact(models, law)
    assert np.abs(law - models.law((), law.ndim)).max() > 1e-4


@pytest.mark.parametrize("kind", ["random", "other", "zeros"])
def test_a_stop_test_that_sends_what_it_looked_at_keeps_the_law(kind: str) -> None:
    """The correct variant of the control above."""
    models = TinyModels(3, kind)
    drafts = _stopped(models, sends_the_last=True)
    assert is_exact(models, committed_law(models, drafts, 3, rule_node("rejection")))

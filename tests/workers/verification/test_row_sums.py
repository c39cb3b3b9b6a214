"""Rules that get most tokens as one keep the target's law, by sums over drafts and coins."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.sampling import SamplingParams, SequenceSpec
from tests.workers.verification.enumeration import (
    NodeOf,
    TinyModels,
    committed_law,
    drawn_chains,
    drawn_trees,
    is_exact,
    unordered_trees,
)
from workers.verification.candidates import DraftProbs, SparseProbs
from workers.verification.choice import draw
from workers.verification.noise import Purpose, gumbel_noise_V
from workers.verification.row_sums import RowSums, begin_sums
from workers.verification.rule import RULES, RuleNode, rule_named

TOSSING = [name for name in RULES if rule_named(name).begin is not None]


class CutModels(TinyModels):
    """A drafter that knows three tokens at a time, so that others are left."""

    def _made(self, rng: np.random.Generator) -> tuple[NDArray[np.float64], SparseProbs]:
        target_V, _ = super()._made(rng)
        ids = np.sort(rng.permutation(self.vocab_size)[:3])
        probs = rng.dirichlet(np.ones(3)).astype(np.float32)
        return target_V, SparseProbs(ids, probs / probs.sum())


def sums_for(target_V: NDArray[np.float64], ids_M: NDArray[np.int64]) -> RowSums:
    """The row whose named tokens are these, with the best score of no noise."""
    with np.errstate(divide="ignore"):
        logs_V = np.log(target_V)
    others_V = np.delete(target_V, ids_M)
    return RowSums(ids_M, logs_V[ids_M], float(others_V.sum()), 0.0, 0)


@dataclass(frozen=True)
class Spread:
    """A node of a row's sums whose residual is spread over the others again."""

    node: RuleNode
    row: RowSums
    target_V: NDArray[np.float64]
    factored: bool

    def acceptance(self, token_id: int) -> float:
        return self.node.acceptance(token_id)

    def refused(self, token_id: int) -> Spread:
        return Spread(self.node.refused(token_id), self.row, self.target_V, self.factored)

    def residual_V(self) -> NDArray[np.float64]:
        residual = self.node.residual_V()
        factor = residual[-1] / self.row.others if self.factored and self.row.others else 1.0
        spread_V = self.target_V * factor
        spread_V[self.row.token_ids_M] = residual[:-1]
        return spread_V


def spread_node(rule: str, *, factored: bool) -> NodeOf:
    """A rule's node; if not `factored`, the rule's factor of the others is forgotten."""

    def begin(
        target_V: NDArray[np.float64], draft_probs: DraftProbs, node: int, num_tests: int
    ) -> RuleNode:
        row = sums_for(target_V, draft_probs.of_node[node].token_ids_M)
        return Spread(begin_sums(rule, row, draft_probs, node, num_tests), row, target_V, factored)

    return begin


@pytest.mark.parametrize("kind", ["random", "zeros", "one-hot target", "disjoint"])
@pytest.mark.parametrize("rule", TOSSING)
def test_the_law_is_the_targets(rule: str, kind: str) -> None:
    """For trees of each rule's own kind. Without the factor the same sums differ."""
    models = CutModels(5, kind)
    shuffled = rule_named(rule).counts_paths
    node, broken = spread_node(rule, factored=True), spread_node(rule, factored=False)
    if shuffled:
        drafts = list(unordered_trees(models, 3, 2))
    elif rule in ("recursive", "mcsd"):
        drafts = list(drawn_trees(models, (((), ()), ()), with_replacement=rule == "mcsd"))
    else:
        drafts = list(drawn_chains(models, 2))
    assert rule_named(rule).others_as_one
    assert is_exact(models, committed_law(models, drafts, 3, node, shuffled=shuffled))
    if kind == "random":  # Of two candidates, often neither named token is left.
        drafts = drafts if shuffled else list(drawn_chains(models, 2))
        wrong = committed_law(models, drafts, 3, broken, shuffled=shuffled)
        assert not is_exact(models, wrong)


def test_a_token_is_drawn_as_from_the_whole_residual() -> None:
    """Also where only named tokens, or only others, are left."""
    rng = np.random.default_rng(3)
    ids_M = np.array([2, 7, 40, 90])
    rest = np.setdiff1d(np.arange(97), ids_M)
    named = 0
    for seed in range(300):
        target_V = rng.dirichlet(np.full(97, 0.5))
        residual = np.append(rng.random(4) * (rng.random(4) < 0.7), 1.0)
        residual[:-1] *= seed % 3 != 0
        residual[-1] *= seed % 5 != 0
        if not residual.any():
            continue
        spec = SequenceSpec(SamplingParams(), seed, 1)
        noise_V = gumbel_noise_V(vocab_size=97, seed=seed, position=5, purpose=Purpose.RESIDUAL)
        scores = np.log(target_V[rest]) + noise_V[rest]
        best = int(scores.argmax())
        row = RowSums(
            ids_M,
            np.log(target_V[ids_M]),
            float(target_V[rest].sum()),
            float(scores[best]),
            int(rest[best]),
        )
        whole_V = target_V * (residual[-1] / row.others)
        whole_V[ids_M] = residual[:-1]
        expected = draw(whole_V, spec, 5, purpose=Purpose.RESIDUAL)
        assert row.draw(residual, spec, 5) == expected
        named += expected in ids_M
    assert 50 < named < 250

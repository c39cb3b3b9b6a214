"""Rejection sampling (Leviathan et al. 2023, Chen et al. 2023), and its repetition in trees.

A candidate is accepted with probability min(1, target / draft). The token after a refusal follows
the positive part of target - draft. Applied repeatedly to what is left, this is recursive
rejection: `recursive` and `mcsd` differ in how the children of a node were drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workers.verification.rule import RULES, CandidateKind, DraftDistribution, Promise, Rule


def acceptance_of(target_prob: float, draft_prob: float) -> float:
    """min(1, target / draft) for a candidate that was drawn, so that its draft_prob is above 0."""
    assert draft_prob > 0, "a token without draft probability was drawn"
    return min(1.0, target_prob / draft_prob)


def residual_of(
    target_probs_V: NDArray[np.float64], draft: DraftDistribution
) -> NDArray[np.float64]:
    """norm((target - draft)+): the distribution of the token after a refusal.

    If the two are equal, nothing is left, and a refusal has probability 0. The target's own
    distribution is then returned, in case rounding causes a refusal.
    """
    left_V = target_probs_V.copy()
    ids_M = draft.token_ids_M
    left_V[ids_M] = np.maximum(left_V[ids_M] - draft.probs_M, 0.0)
    return normalized(left_V, otherwise_V=target_probs_V)


def normalized(
    weights_V: NDArray[np.float64], *, otherwise_V: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The weights divided by their sum, in place; `otherwise_V` if the sum is 0."""
    total = float(weights_V.sum())
    if total <= 0:
        return otherwise_V
    weights_V /= total
    return weights_V


@dataclass(frozen=True, slots=True, eq=False)
class RejectionNode:
    """The children of one node under rejection, tested in the order in which they were drawn.

    `target_probs_V` is what is left of the target's distribution. `draft` is the distribution from
    which the next child was drawn. With a single child this is plain rejection. `with_replacement`:
    the draft distribution stays after a refusal; otherwise the refused token leaves it.
    """

    target_probs_V: NDArray[np.float64]
    draft: DraftDistribution
    with_replacement: bool

    def acceptance(self, token_id: int) -> float:
        return acceptance_of(float(self.target_probs_V[token_id]), self.draft.prob_of(token_id))

    def refused(self, token_id: int) -> RejectionNode:
        return RejectionNode(
            residual_of(self.target_probs_V, self.draft),
            self.draft if self.with_replacement else self.draft.without(token_id),
            self.with_replacement,
        )

    def residual_V(self) -> NDArray[np.float64]:
        return self.target_probs_V


def begin_without_replacement(
    target_probs_V: NDArray[np.float64], draft: DraftDistribution | None, num_tests: int
) -> RejectionNode:
    """A node whose children were drawn without replacement; a chain's only child is one of them."""
    assert draft is not None
    return RejectionNode(target_probs_V, draft, with_replacement=False)


def begin_with_replacement(
    target_probs_V: NDArray[np.float64], draft: DraftDistribution | None, num_tests: int
) -> RejectionNode:
    """A node whose children were drawn with replacement."""
    assert draft is not None
    return RejectionNode(target_probs_V, draft, with_replacement=True)


RULES.add(
    Rule(
        name="rejection",
        help="rejection sampling of chains drawn by the drafter",
        paper="Leviathan et al. 2023, Chen et al. 2023",
        promise=Promise.LAW,
        exact_for=frozenset({CandidateKind.SAMPLED_CHAIN}),
        drawn_as=CandidateKind.SAMPLED_CHAIN,
        needs_draft_probs=True,
        begin=begin_without_replacement,
    )
)

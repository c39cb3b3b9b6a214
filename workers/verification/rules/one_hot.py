"""Candidates that were not drawn: n-grams, tables, greedy trees. They have no draft probabilities.

The rule is rejection sampling (Leviathan et al. 2023) with a draft distribution of one token. A
candidate is accepted with the target's own probability of it. If it is refused, it can no longer
occur, and the next one is tested on the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workers.verification.rule import RULES, CandidateKind, DraftDistribution, Promise, Rule
from workers.verification.rules.rejection import normalized


@dataclass(frozen=True, slots=True, eq=False)
class OneHotNode:
    """The children of one node; `target_probs_V` is what is left of the target's distribution."""

    target_probs_V: NDArray[np.float64]

    def acceptance(self, token_id: int) -> float:
        return float(self.target_probs_V[token_id])

    def refused(self, token_id: int) -> OneHotNode:
        left_V = self.target_probs_V.copy()
        left_V[token_id] = 0.0
        return OneHotNode(normalized(left_V, otherwise_V=self.target_probs_V))

    def residual_V(self) -> NDArray[np.float64]:
        return self.target_probs_V


def _begin(
    target_probs_V: NDArray[np.float64], draft: DraftDistribution | None, num_tests: int
) -> OneHotNode:
    return OneHotNode(target_probs_V)


RULES.add(
    Rule(
        name="one-hot",
        help="rejection sampling of candidates that were not drawn",
        paper="Leviathan et al. 2023, with a draft distribution of one token",
        promise=Promise.LAW,
        # Drawn candidates count as fixed ones, unless they were drawn with the target's noise.
        exact_for=frozenset(CandidateKind) - {CandidateKind.SHARED_NOISE},
        drawn_as=None,
        begin=_begin,
    )
)

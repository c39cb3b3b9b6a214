"""Candidates that nothing was drawn for: n-grams, tables, greedy trees. No draft probabilities.

A candidate is accepted with the target's own probability of it; refused, it can no longer come,
and the next one is tested on what is left.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workers.verification.rejection import normalised


@dataclass(frozen=True, slots=True, eq=False)
class OneHotNode:
    """The children of one node; `target_probs_V` is what is left of the target's distribution."""

    target_probs_V: NDArray[np.float64]

    def acceptance(self, token_id: int) -> float:
        """The probability that this child is accepted, after the refusals so far."""
        return float(self.target_probs_V[token_id])

    def refused(self, token_id: int) -> OneHotNode:
        """What is left once this child was refused."""
        left_V = self.target_probs_V.copy()
        left_V[token_id] = 0.0
        return OneHotNode(normalised(left_V, otherwise_V=self.target_probs_V))

    def residual_V(self) -> NDArray[np.float64]:
        """What the token follows when no child is left to test."""
        return self.target_probs_V

"""The distributions that candidates were drawn from, as a few pairs of token id and probability.

A drafter cuts its distribution to the likeliest tokens and samples from the rest, so the pairs are
exactly what it sampled from, and not an approximation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ProtocolError
from workers.verification.candidates import CandidateTree

SUM_TOLERANCE = 1e-5
"""Largest difference from 1 that the sum of a node's float32 probabilities may have."""


@dataclass(frozen=True, slots=True, eq=False)
class SparseProbs:
    """M pairs that a drafter draws from: ascending token ids, and float32 probabilities."""

    token_ids_M: NDArray[np.int64]
    probs_M: NDArray[np.float32]

    def exact(self) -> DraftDistribution:
        """The exact distribution of a draw from these pairs: float64, divided by their sum.

        A Gumbel argmax over their logs ignores a common factor, so the draw follows the normalized
        distribution, however the float32 values were rounded.
        """
        probs_M = self.probs_M.astype(np.float64)
        return DraftDistribution(self.token_ids_M, probs_M / probs_M.sum())

    def equals(self, other: SparseProbs) -> bool:
        """Whether the pairs are the same."""
        return self is other or (
            np.array_equal(self.token_ids_M, other.token_ids_M)
            and np.array_equal(self.probs_M, other.probs_M)
        )

    def check(self, *, vocab_size: int, node: int) -> None:
        """Raise ProtocolError if these are not the probabilities of some tokens."""
        ids, probs = self.token_ids_M, self.probs_M
        if ids.ndim != 1 or ids.shape != probs.shape or ids.size == 0:
            raise ProtocolError(
                f"expected as many draft probabilities as token ids under node {node}, got "
                f"{list(probs.shape)} for {list(ids.shape)}: send pairs"
            )
        if ids[0] < 0 or ids[-1] >= vocab_size or bool((np.diff(ids) <= 0).any()):
            raise ProtocolError(
                f"expected ascending token ids below {vocab_size} for the draft probabilities "
                f"under node {node}, got {ids[0]} to {ids[-1]}: sort them, each once"
            )
        if not np.isfinite(probs).all() or bool((probs < 0).any()):
            raise ProtocolError(
                f"expected finite draft probabilities of at least 0 under node {node}, got "
                f"{float(probs.min())} to {float(probs.max())}: send probabilities, not logits"
            )
        total = float(probs.sum(dtype=np.float64))
        if abs(total - 1) > SUM_TOLERANCE:
            raise ProtocolError(
                f"expected draft probabilities that sum to 1 under node {node}, got {total}: "
                "normalize them after the cut"
            )


@dataclass(frozen=True, slots=True, eq=False)
class DraftDistribution:
    """Ascending token ids [M] and their float64 probabilities, which sum to 1. Others have 0."""

    token_ids_M: NDArray[np.int64]
    probs_M: NDArray[np.float64]

    def prob_of(self, token_id: int) -> float:
        """The probability of a token."""
        index = int(np.searchsorted(self.token_ids_M, token_id))
        if index == self.token_ids_M.size or self.token_ids_M[index] != token_id:
            return 0.0
        return float(self.probs_M[index])

    def without(self, token_id: int) -> DraftDistribution:
        """The distribution of the next draw if this token may not come again."""
        probs_M = np.where(self.token_ids_M == token_id, 0.0, self.probs_M)
        total = float(probs_M.sum())
        return DraftDistribution(self.token_ids_M, probs_M / total if total > 0 else probs_M)


@dataclass(frozen=True, slots=True, eq=False)
class DraftProbs:
    """For each node that has children, the pairs that they were drawn from (see CandidateTree)."""

    of_node: Mapping[int, SparseProbs]

    def check(self, tree: CandidateTree, *, vocab_size: int) -> None:
        """Raise ProtocolError if a node's pairs are absent, wrong, or lack one of its children.

        Pairs of nodes without children are an error too, since nothing could use them.
        """
        expected = {node for node in range(len(tree) + 1) if tree.children(node)}
        if expected != set(self.of_node):
            raise ProtocolError(
                f"expected draft probabilities for the nodes {sorted(expected)}, got them for "
                f"{sorted(self.of_node)}: send them for every node that has children"
            )
        for node, pairs in self.of_node.items():
            pairs.check(vocab_size=vocab_size, node=node)
            exact = pairs.exact()
            for index in tree.children(node):
                if exact.prob_of(tree.token_ids[index]) <= 0:
                    raise ProtocolError(
                        f"expected a draft probability above 0 for candidate {index} (token "
                        f"{tree.token_ids[index]}), got none under node {node}: send the "
                        "distribution that it was drawn from"
                    )

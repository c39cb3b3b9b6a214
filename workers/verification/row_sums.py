"""Rules that toss coins, for rows of which each rank of a group has one part.

A rule reads the probabilities of some tokens of a row, the named ones: those that it tests, and
those of the draft distribution. It changes those of all others by one factor. So it gets the others
as one token with their summed probability (Rule.others_as_one), and its arithmetic stays its own.
A token of the residual is argmax(log weight + noise), as in choice.draw. The best score of the
others is known up to the rule's factor, which is the same for all of them; it then competes with
the scores of the named tokens. The token is that of choice.draw, unless two scores differ only by
rounding.

Shapes: M named tokens; the others follow them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from paceline.sampling import SequenceSpec
from workers.verification.candidates import CandidateTree, DraftProbs
from workers.verification.choice import noise_of
from workers.verification.distribution import Distribution
from workers.verification.noise import Purpose
from workers.verification.rule import DraftDistribution, RuleNode, rule_named
from workers.verification.verify import KeyedCoins, draft_at, walk


@dataclass(frozen=True, slots=True, eq=False)
class RowSums:
    """A row after all sampling parameters, up to a factor.

    `log_weights_M` of the named tokens; `others`: the sum of all other weights. `best`: the largest
    log weight plus noise (Purpose.RESIDUAL) among the others, at the token `best_id`.
    """

    token_ids_M: NDArray[np.int64]
    log_weights_M: NDArray[np.float64]
    others: float
    best: float
    best_id: int

    def probs(self) -> NDArray[np.float64]:
        """The probabilities of the named tokens and of all others, [M + 1]."""
        weights: NDArray[np.float64] = np.append(np.exp(self.log_weights_M), self.others)
        weights /= weights.sum()
        return weights

    def draw(self, residual: NDArray[np.float64], spec: SequenceSpec, position: int) -> int:
        """The token that choice.draw finds in a residual, of which this is [M + 1]."""
        scores: list[tuple[float, int]] = []
        if residual[-1] > 0:
            scores.append((self.best + float(np.log(residual[-1] / self.others)), -self.best_id))
        possible = np.flatnonzero(residual[:-1] > 0)
        if possible.size:
            ids, log_weights = self.token_ids_M[possible], np.log(residual[possible])
            kept = Distribution(ids, log_weights.astype(np.float32))
            bound = int(ids[-1]) + 1  # It limits the ids for which noise is computed, no more.
            noise = noise_of(kept, bound, spec, position, purpose=Purpose.RESIDUAL)
            scores += zip((log_weights + noise).tolist(), (-ids).tolist(), strict=True)
        return -max(scores)[1]  # Among equal scores the lowest id wins.


def named_tokens(
    rule: str, tree: CandidateTree, draft_probs: DraftProbs | None
) -> dict[int, NDArray[np.int64]]:
    """The named tokens at each node that has children, ascending."""
    named: dict[int, NDArray[np.int64]] = {}
    for node in range(len(tree) + 1):
        children = tree.children(node)
        if children:
            draft = draft_at(rule, draft_probs, node)
            tested = np.array(tree.tokens_of(children), dtype=np.int64)
            named[node] = np.unique(tested if draft is None else draft.token_ids_M)
    return named


SumsAt = Callable[[int, Sequence[int]], RowSums]
"""The row at a node, which a path of accepted candidates reaches."""


def walk_sums(
    rule: str,
    tree: CandidateTree,
    spec: SequenceSpec,
    first_position: int,
    draft_probs: DraftProbs | None,
    sums_at: SumsAt,
) -> tuple[tuple[int, ...], int | None]:
    """The candidates that the rule accepts, and the token after a refusal, or None, as `walk`.

    `first_position` is the position of the token after the prefix.
    """
    coins = _CoinsOfSums(tree, spec, first_position)

    def begin(node: int, accepted: tuple[int, ...]) -> RuleNode:
        row, position = sums_at(node, accepted), first_position + len(accepted)
        coins.draw = partial(row.draw, spec=spec, position=position)
        return begin_sums(rule, row, draft_probs, node, len(tree.copies(node)))

    return walk(tree, begin, coins, shuffled=rule_named(rule).counts_paths)


class _CoinsOfSums(KeyedCoins):
    """The coins of KeyedCoins. `draw`: draws the token at the node where the walk is."""

    draw: Callable[[NDArray[np.float64]], int]

    def token(self, depth: int, residual_V: NDArray[np.float64]) -> int:
        return self.draw(residual_V)


def begin_sums(
    rule: str, row: RowSums, draft_probs: DraftProbs | None, node: int, num_tests: int
) -> RuleNode:
    """As begin_node; the residual is that of the named tokens and of all others, [M + 1]."""
    begin = rule_named(rule).begin
    assert begin is not None, f"{rule} tosses no coins"
    draft = draft_at(rule, draft_probs, node)
    if draft is not None:
        places_M = np.searchsorted(row.token_ids_M, draft.token_ids_M)
        draft = DraftDistribution(places_M, draft.probs_M)
    return _Renamed(begin(row.probs(), draft, num_tests), row.token_ids_M)


@dataclass(frozen=True, slots=True, eq=False)
class _Renamed:
    """A node whose token ids are the places of the named tokens."""

    node: RuleNode
    token_ids_M: NDArray[np.int64]

    def acceptance(self, token_id: int) -> float:
        return self.node.acceptance(self._place(token_id))

    def refused(self, token_id: int) -> _Renamed:
        return _Renamed(self.node.refused(self._place(token_id)), self.token_ids_M)

    def residual_V(self) -> NDArray[np.float64]:
        return self.node.residual_V()

    def _place(self, token_id: int) -> int:
        return int(np.searchsorted(self.token_ids_M, token_id))

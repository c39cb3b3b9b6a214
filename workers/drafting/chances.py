"""How likely a candidate is to be accepted once its parent is, learned from outcomes.

Per rank among its siblings, and per bin of a gap that says how sure the drafter is of it: what
Sequoia and EAGLE-2 take from a calibration run and from the draft's confidence, online. These are
estimates: they say where nodes are spent, and never what is committed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable

NUM_RANKS = 8
_GAP_EDGES = (0.1, 0.25, 0.5, 1.0, 1.7, 2.6, 4.0)
_GAP_CENTRES = (0.05, 0.18, 0.37, 0.75, 1.3, 2.1, 3.2, 5.5)
_PRIOR_WEIGHT = 6.0
_FADING = 0.998
"""What a bin has seen is weighed by this with each new observation in it."""


def coupled_prior(rank: int, gap: float) -> float:
    """For the coupled rule: of the first, how far its score is ahead of the second; of the others,
    how far the first is ahead of them.
    """
    if rank == 0:
        return 0.45 + 0.5 * (1 - math.exp(-gap))
    return 0.35 * math.exp(-gap) / rank


def drawn_prior(rank: int, gap: float) -> float:
    """For rules that toss coins: the gap is -log of the candidate's draft probability."""
    return (0.35 + 0.6 * math.exp(-gap)) * 0.4**rank


class RankChances:
    """Shares of candidates that were accepted, by rank and gap; each begins as a prior."""

    def __init__(self, prior: Callable[[int, float], float]) -> None:
        self._tested = [[_PRIOR_WEIGHT] * len(_GAP_CENTRES) for _ in range(NUM_RANKS)]
        self._accepted = [
            [_PRIOR_WEIGHT * prior(rank, gap) for gap in _GAP_CENTRES] for rank in range(NUM_RANKS)
        ]
        middle = _GAP_CENTRES[len(_GAP_CENTRES) // 2]
        self._mean_tested = [_PRIOR_WEIGHT] * NUM_RANKS
        self._mean_accepted = [_PRIOR_WEIGHT * prior(rank, middle) for rank in range(NUM_RANKS)]

    def estimate(self, rank: int, gap: float) -> float:
        """For a candidate that is known."""
        rank, bin_ = rank if rank < NUM_RANKS else NUM_RANKS - 1, bisect_left(_GAP_EDGES, gap)
        return self._accepted[rank][bin_] / self._tested[rank][bin_]

    def mean(self, rank: int) -> float:
        """For one of which only its rank is known."""
        rank = min(rank, NUM_RANKS - 1)
        return self._mean_accepted[rank] / self._mean_tested[rank]

    def observe(self, rank: int, gap: float, *, accepted: bool) -> None:
        """A candidate was tested."""
        rank, bin_ = min(rank, NUM_RANKS - 1), _bin(gap)
        self._tested[rank][bin_] = self._tested[rank][bin_] * _FADING + 1
        self._accepted[rank][bin_] = self._accepted[rank][bin_] * _FADING + accepted
        self._observe_mean(rank, accepted=accepted)

    def observe_alone(self, *, accepted: bool) -> None:
        """A candidate was tested that was drawn alone, so that nothing was known of a gap."""
        self._observe_mean(0, accepted=accepted)

    def _observe_mean(self, rank: int, *, accepted: bool) -> None:
        self._mean_tested[rank] = self._mean_tested[rank] * _FADING + 1
        self._mean_accepted[rank] = self._mean_accepted[rank] * _FADING + accepted


def _bin(gap: float) -> int:
    return bisect_left(_GAP_EDGES, gap)

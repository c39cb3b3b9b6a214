"""Estimates how likely a candidate is to be accepted if its parent is, learned from outcomes.

Observations are kept per rank among the siblings, and per bin of the gap, a number that says how
sure the drafter is of the candidate. Sequoia takes such estimates from a calibration run, and
EAGLE-2 from the draft's confidence; here they are learned online. They decide where the grant's
nodes are spent, and never what is committed.
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
"""Each new observation in a bin multiplies the older ones by this factor."""


def coupled_prior(rank: int, gap: float) -> float:
    """The prior for the coupled rule.

    `gap` is the difference between the first candidate's score and the second's for rank 0, and
    between the first candidate's score and this one's for other ranks.
    """
    if rank == 0:
        return 0.45 + 0.5 * (1 - math.exp(-gap))
    return 0.35 * math.exp(-gap) / rank


def drawn_prior(rank: int, gap: float) -> float:
    """The prior for rules that toss coins: `gap` is -log of the candidate's draft probability."""
    return (0.35 + 0.6 * math.exp(-gap)) * 0.4**rank


class RankChances:
    """The share of candidates that were accepted, by rank and gap. Each share starts at `prior`."""

    def __init__(self, prior: Callable[[int, float], float]) -> None:
        self._tested = [[_PRIOR_WEIGHT] * len(_GAP_CENTRES) for _ in range(NUM_RANKS)]
        self._accepted = [
            [_PRIOR_WEIGHT * prior(rank, gap) for gap in _GAP_CENTRES] for rank in range(NUM_RANKS)
        ]
        middle = _GAP_CENTRES[len(_GAP_CENTRES) // 2]
        self._mean_tested = [_PRIOR_WEIGHT] * NUM_RANKS
        self._mean_accepted = [_PRIOR_WEIGHT * prior(rank, middle) for rank in range(NUM_RANKS)]

    def estimate(self, rank: int, gap: float) -> float:
        """The chance of a candidate whose rank and gap are known."""
        rank, bin_ = rank if rank < NUM_RANKS else NUM_RANKS - 1, bisect_left(_GAP_EDGES, gap)
        return self._accepted[rank][bin_] / self._tested[rank][bin_]

    def mean(self, rank: int) -> float:
        """The chance of a candidate whose gap is unknown."""
        rank = min(rank, NUM_RANKS - 1)
        return self._mean_accepted[rank] / self._mean_tested[rank]

    def observe(self, rank: int, gap: float, *, accepted: bool) -> None:
        rank, bin_ = min(rank, NUM_RANKS - 1), _bin(gap)
        self._tested[rank][bin_] = self._tested[rank][bin_] * _FADING + 1
        self._accepted[rank][bin_] = self._accepted[rank][bin_] * _FADING + accepted
        self._observe_mean(rank, accepted=accepted)

    def observe_alone(self, *, accepted: bool) -> None:
        """Note the test of a candidate that was drawn alone: it has rank 0 and no gap."""
        self._observe_mean(0, accepted=accepted)

    def _observe_mean(self, rank: int, *, accepted: bool) -> None:
        self._mean_tested[rank] = self._mean_tested[rank] * _FADING + 1
        self._mean_accepted[rank] = self._mean_accepted[rank] * _FADING + accepted


def _bin(gap: float) -> int:
    return bisect_left(_GAP_EDGES, gap)

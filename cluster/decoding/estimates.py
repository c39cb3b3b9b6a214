"""What the controller of `auto` believes, from what it saw: running estimates, recent first.

All times are milliseconds. Nothing here decides anything.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

_SLOW = 0.95
"""Of a mean, so much is kept when a new value comes."""

MAX_POSITION = 12
"""Acceptance is estimated by position of the window up to here; later ones are like the last."""


@dataclass(slots=True)
class Mean:
    """A decayed mean; the first values count in full."""

    value: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> None:
        """A new value."""
        self.weight = self.weight * _SLOW + 1
        self.value += (value - self.value) / self.weight

    @property
    def known(self) -> bool:
        """Whether there was a value."""
        return self.weight > 0


class StepTimes:
    """How long a step takes by the rows that it feeds, from sending to answer.

    A step takes no less with more rows, so a noisy mean of fewer rows above one of more is taken
    as equal to it (pool adjacent violators). Between what was seen it is linear; beyond that it
    goes on as steeply as from one end of it to the other, so that what was never tried looks
    neither free nor worse than what is known.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Mean, Mean]] = {}
        self._line: list[tuple[float, float]] = []
        self._stale = True

    def add(self, rows: int, ms: float) -> None:
        """A step that fed so many rows was answered."""
        means = self._seen.setdefault(_size_class(rows), (Mean(), Mean()))
        means[0].add(rows)
        means[1].add(ms)
        self._stale = True

    @property
    def known(self) -> bool:
        """Whether a step was seen."""
        return bool(self._seen)

    def ms(self, rows: float) -> float:
        """How long such a step takes. Some step must have been seen."""
        line = self._points()
        index = bisect_right(line, (rows, math.inf))
        if index == 0:
            rows_after, ms_after = line[0]
            return max(ms_after / 4, ms_after - (rows_after - rows) * self._slope_beyond())
        if index == len(line):
            rows_before, ms_before = line[-1]
            return ms_before + (rows - rows_before) * self._slope_beyond()
        (left, low), (right, high) = line[index - 1], line[index]
        return low + (rows - left) * (high - low) / (right - left)

    def ms_per_row(self, rows: float) -> float:
        """What one more row adds to a step of so many: over the next tenth of them."""
        more = max(1.0, rows / 10)
        return max(0.0, (self.ms(rows + more) - self.ms(rows)) / more)

    def _slope_beyond(self) -> float:
        line = self._line
        if len(line) < 2:
            return 0.0
        (left, low), (right, high) = line[0], line[-1]
        return (high - low) / (right - left)

    def _points(self) -> list[tuple[float, float]]:
        if self._stale:
            pools: list[tuple[float, float, float]] = []  # rows, ms, weight
            for _, (rows, ms) in sorted(self._seen.items()):
                pools.append((rows.value, ms.value, ms.weight))
            self._line = _rising(pools)
            self._stale = False
        return self._line


@dataclass(slots=True)
class DraftTimes:
    """One drafter: its passes by batch, and how soon it answers a verdict that went against it.

    `restart`: from the verdict to the first candidate that continues it. Passes that grow branches
    feed more, so they are apart; of them each gives a token of the chain.
    """

    restart: Mean = field(default_factory=Mean)
    tokens_a_pass: Mean = field(default_factory=Mean)
    _passes: dict[tuple[int, bool], Mean] = field(default_factory=dict)
    _last_batch: int = 1

    def add_pass(self, *, batch: int, tokens: int, ms: float, branches: bool = False) -> None:
        """A pass proposed chains of `tokens` candidates in all to `batch` sequences."""
        self._last_batch = batch
        self._passes.setdefault((batch.bit_length(), branches), Mean()).add(ms)
        self.tokens_a_pass.add(tokens / batch)

    @property
    def known(self) -> bool:
        """Whether a pass and a restart were seen."""
        return bool(self._passes) and self.restart.known

    def pass_ms(self, *, branches: bool = False) -> float:
        """Of a pass with as many sequences as the last one had, with branches or without.

        Some pass must have been seen. Where none of the kind was, the other kind's.
        """
        size = self._last_batch.bit_length()
        return (self._passes.get((size, branches)) or self._passes[size, not branches]).value

    @property
    def round_trip_ms(self) -> float:
        """There and back: what a restart takes beside its pass, and half of the one before it."""
        if not self.known:
            return 0.0
        return max(0.0, self.restart.value - 1.5 * self.pass_ms())


class Acceptance:
    """The chance of a candidate given those before it, by position of the window.

    Few observations lean on `prior`: the same of many sequences, or a first guess.
    """

    __slots__ = ("_accepted", "_prior", "_prior_weight", "_tried", "candidates")

    DECAY = 0.97

    def __init__(self, prior: Acceptance | float, *, prior_weight: float = 4.0) -> None:
        self._prior = prior
        self._prior_weight = prior_weight
        self._tried = [0.0] * MAX_POSITION
        self._accepted = [0.0] * MAX_POSITION
        self.candidates = 0
        """How many were tried in all."""

    def add(self, *, tried: int, accepted: int) -> None:
        """A verdict tried so many positions from the first on, and accepted so many."""
        self.candidates += tried
        tried, accepted = min(tried, MAX_POSITION), min(accepted, MAX_POSITION)
        for place in range(tried):
            self._tried[place] = self._tried[place] * self.DECAY + 1
            self._accepted[place] = self._accepted[place] * self.DECAY + (place < accepted)

    def chance(self, position: int) -> float:
        """Of the candidate at this position, from 1 on, given those before it.

        It leans on the mean of all positions, and that on the prior.
        """
        place = min(position, MAX_POSITION) - 1
        weight = self._prior_weight
        return (self._accepted[place] + weight * self.mean) / (self._tried[place] + weight)

    @property
    def mean(self) -> float:
        """Of all positions together."""
        prior = self._prior.mean if isinstance(self._prior, Acceptance) else self._prior
        weight = self._prior_weight
        return (sum(self._accepted) + weight * prior) / (sum(self._tried) + weight)

    def chances(self, count: int) -> tuple[float, ...]:
        """Of positions 1 to `count`."""
        return tuple(self.chance(position) for position in range(1, count + 1))


def _size_class(rows: int) -> int:
    """Rows that are counted together: each number alone up to 8, then steps of a fifth."""
    return rows if rows <= 8 else 8 + int(math.log(rows / 8) / math.log(1.2))


def _rising(points: Sequence[tuple[float, float, float]]) -> list[tuple[float, float]]:
    """(x, y) of the nearest curve that never falls, given (x, y, weight) by rising x."""
    pools: list[list[tuple[float, float, float]]] = []
    means: list[float] = []
    for point in points:
        pools.append([point])
        means.append(point[1])
        while len(means) > 1 and means[-2] >= means[-1]:
            merged = pools[-2] + pools[-1]
            pools[-2:] = [merged]
            total = sum(weight for _, _, weight in merged)
            means[-2:] = [sum(y * weight for _, y, weight in merged) / total]
    return [(x, mean) for pool, mean in zip(pools, means, strict=True) for x, _, _ in pool]

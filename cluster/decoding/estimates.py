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

_APART = 1.2
"""Sizes that differ by more tell how steep it is between them."""

_MOST_PAUSE_MS, _PAUSE_RISES = 1.0, 0.05
"""A drafter that pauses for longer had nothing to do. A longer pause than the last counts little:
what was said may be late."""

_LATE = 2.0
"""So many times what is usual, or more, tells of a host that was held up, not of a device."""

MAX_POSITION = 12
"""Acceptance is estimated by position of the window up to here; later ones are like the last."""


@dataclass(slots=True)
class Mean:
    """A decayed mean; the first values count in full."""

    value: float = 0.0
    weight: float = 0.0

    def add(self, value: float, *, of: int = 1) -> None:
        """A new value, one of so many that come at a time."""
        self.weight = self.weight * (1 - (1 - _SLOW) / of) + 1
        self.value += (value - self.value) / self.weight

    @property
    def known(self) -> bool:
        """Whether there was a value."""
        return self.weight > 0


class TimesBySize:
    """How long something takes by its size: a device's pass by its rows, say.

    More takes no less time, so a noisy mean of a smaller size above that of a larger one is taken
    as equal to it (pool adjacent violators). Between what was seen it is linear; beyond that it
    goes on as steeply as from one end of it to the other, so that what was never tried looks
    neither free nor worse than what is known. Below it goes on as between the smallest sizes, since
    it is the flatter the less there is.
    """

    def __init__(self, *, nothing_takes_none: bool = False) -> None:
        """`nothing_takes_none`: size 0 takes no time, so that much is known from the start."""
        self._origin = [(0.0, 0.0, 1.0)] if nothing_takes_none else []
        self._seen: dict[int, tuple[Mean, Mean]] = {}
        self._line: list[tuple[float, float]] = []
        self._stale = True

    def add(self, size: int, ms: float, *, afresh: bool = False) -> None:
        """Something of this size took so long; `afresh`: what contradicts it is no longer so."""
        if afresh:
            own = _size_class(size)
            self._seen = {
                one: means
                for one, means in self._seen.items()
                if (one < own and means[1].value <= ms) or (one > own and means[1].value >= ms)
            }
        means = self._seen.setdefault(_size_class(size), (Mean(), Mean()))
        means[0].add(size)
        means[1].add(ms)
        self._stale = True

    @property
    def known(self) -> bool:
        """Whether anything was seen."""
        return bool(self._seen)

    @property
    def largest(self) -> float:
        """The largest size that was seen, 0: none was."""
        return self._points()[-1][0] if self._seen else 0.0

    def ms(self, size: float) -> float:
        """How long it takes at this size. Something must have been seen."""
        line = self._points()
        index = bisect_right(line, (size, math.inf))
        if index == 0:
            size_after, ms_after = line[0]
            further = next((one for one in line if one[0] > _APART * size_after), line[-1])
            level = _slope((line[0], further))
            return max(ms_after / 4, ms_after - (size_after - size) * level)
        if index == len(line):
            size_before, ms_before = line[-1]
            return ms_before + (size - size_before) * _slope(line)
        (left, low), (right, high) = line[index - 1], line[index]
        return low + (size - left) * (high - low) / (right - left)

    def ms_per_unit(self, size: float) -> float:
        """What one more adds at this size: over the next tenth of it."""
        more = max(1.0, size / 10)
        return max(0.0, (self.ms(size + more) - self.ms(size)) / more)

    def _points(self) -> list[tuple[float, float]]:
        if self._stale:
            pools = list(self._origin)  # size, ms, weight
            for _, (size, ms) in sorted(self._seen.items()):
                pools.append((size.value, ms.value, ms.weight))
            self._line = _rising(pools)
            self._stale = False
        return self._line


@dataclass(slots=True)
class DraftTimes:
    """One drafter: its passes by batch, and how soon it answers a verdict that went against it.

    Passes that grow branches feed more and say more, so they are apart; of them each gives a token
    of the chain.
    """

    tokens_a_pass: Mean = field(default_factory=Mean)
    branch_messages: Mean = field(default_factory=Mean)
    """Proposals of a pass for a sequence that has branches, the first not counted."""
    _passes: dict[bool, TimesBySize] = field(default_factory=dict)  # by batch
    _restarts: dict[bool, Mean] = field(default_factory=dict)
    _heard_at: float | None = None
    pause_ms: float = 0.0
    """Between two passes when there is work: for answers to leave, messages to be read."""

    def heard(self, now: float, pass_ms: float) -> None:
        """A pass that took so long was heard of, seconds. Of the time between the least counts."""
        before, self._heard_at = self._heard_at, now
        pause_ms = _MOST_PAUSE_MS if before is None else (now - before) * 1000 - pass_ms
        if 0.0 <= pause_ms < _MOST_PAUSE_MS:
            more_ms = pause_ms - self.pause_ms
            self.pause_ms += more_ms * (_PAUSE_RISES if self.pause_ms and more_ms > 0 else 1.0)

    def add_pass(self, *, batch: int, tokens: int, ms: float, branches: bool = False) -> None:
        """A pass proposed chains of `tokens` candidates in all to `batch` sequences."""
        passes = self._passes.setdefault(branches, TimesBySize())
        passes.add(batch, min(ms, _LATE * passes.ms(batch)) if passes.known else ms)
        self.tokens_a_pass.add(tokens / batch)

    def add_restart(self, ms: float, *, branches: bool = False) -> None:
        """From a verdict to the first candidate that continues it."""
        mean = self._restarts.setdefault(branches, Mean())
        mean.add(min(ms, _LATE * mean.value) if mean.known else ms)

    @property
    def known(self) -> bool:
        """Whether a pass was seen."""
        return bool(self._passes)

    def restart_ms(self, *, branches: bool = False) -> float:
        """Of a sequence with branches or without; where none of the kind was seen, of the other.

        Before any was seen: what it takes without a round trip.
        """
        mean = self._restarts.get(branches) or self._restarts.get(not branches)
        return 1.5 * self.pass_ms(1, branches=branches) if mean is None else mean.value

    def pass_ms(self, batch: int, *, branches: bool = False) -> float:
        """Of a pass with about so many sequences, with branches or without.

        Some pass must have been seen. Where none of the kind was, the other kind's.
        """
        return (self._passes.get(branches) or self._passes[not branches]).ms(batch)

    @property
    def round_trip_ms(self) -> float:
        """There and back: what a restart takes beside its pass, and half of the one before it."""
        if not self.known:
            return 0.0
        return max(0.0, self.restart_ms() - 1.5 * self.pass_ms(1))


class Acceptance:
    """The chance of a candidate given those before it, by position of the window.

    Few observations lean on `prior`: the same of many sequences, or a first guess.
    """

    __slots__ = ("_accepted", "_prior", "_prior_weight", "_tried", "candidates")

    DECAY = 0.97
    """Of what was seen, so much is kept from one verdict of a sequence to its next."""

    FADED = 0.2

    def __init__(self, prior: Acceptance | float, *, prior_weight: float = 4.0) -> None:
        self._prior = prior
        self._prior_weight = prior_weight
        self._tried = [0.0] * MAX_POSITION
        self._accepted = [0.0] * MAX_POSITION
        self.candidates = 0
        """How many were tried in all."""

    def add(self, rights: Sequence[bool], *, sequences: int = 1) -> None:
        """A verdict tried these positions from the first on; whether each candidate was right.

        It is of one of so many sequences, whose verdicts are all added.
        """
        self.candidates += len(rights)
        kept = 1 - (1 - self.DECAY) / sequences
        for place, right in enumerate(rights[:MAX_POSITION]):
            self._tried[place] = self._tried[place] * kept + 1
            self._accepted[place] = self._accepted[place] * kept + right

    def fade(self) -> None:
        """What was seen is long ago: it counts for little from now on."""
        self._tried = [tried * self.FADED for tried in self._tried]
        self._accepted = [accepted * self.FADED for accepted in self._accepted]

    def chance(self, position: int) -> float:
        """Of the candidate at this position, from 1 on, given those before it.

        It leans on the mean of all positions, and that on the prior.
        """
        return self.chances(position)[-1]

    @property
    def mean(self) -> float:
        """Of all positions together."""
        prior = self._prior.mean if isinstance(self._prior, Acceptance) else self._prior
        weight = self._prior_weight
        return (sum(self._accepted) + weight * prior) / (sum(self._tried) + weight)

    def chances(self, count: int) -> tuple[float, ...]:
        """Of positions 1 to `count`."""
        weight, leaning = self._prior_weight, self._prior_weight * self.mean
        found = [
            (accepted + leaning) / (tried + weight)
            for accepted, tried in zip(self._accepted[:count], self._tried[:count], strict=True)
        ]
        return (*found, *found[-1:] * (count - len(found)))


def _slope(line: Sequence[tuple[float, float]]) -> float:
    """From the first of these points to the last; of a single one: level."""
    (left, low), (right, high) = line[0], line[-1]
    return (high - low) / (right - left) if right > left else 0.0


def _size_class(size: int) -> int:
    """Sizes that are counted together: each number alone up to 8, then steps of a fifth."""
    return size if size <= 8 else 8 + int(math.log(size / 8) / math.log(1.2))


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

"""How many threads the next step computes with: as many as help at this moment.

Threads that share a step meet some two hundred times in it. Where another process takes one of
their cores, each meeting waits for a turn of the scheduler, milliseconds: two threads that take
18 ms a step alone took 1,190 ms beside one busy process, where one thread took 36. So a step
may have fewer threads than there are; its rows have the same bits with any number of them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median

MORE_SHARE = 0.04
"""Of the time, what trials of more threads than now may cost: others take a core for a while."""
FEWER_SHARE = 0.005
"""Of the time, what trials of fewer may cost."""
DISTURBED = 1.25
"""How slow a step must be for fewer to be tried: a trial delays the tokens of all."""

_RECENT = 3
"""Steps whose median says how disturbed a number of threads is: one slow step says nothing."""
_DRIFT = 1.005
"""What a kind's quickest step is taken to grow by with every step: contexts get longer."""


class ThreadChoice:
    """Expects of a number of threads its quickest step of the kind times its recent slowness.

    Kinds of steps are the powers of two of their rows. What was not tried with a kind is taken to
    be to what was as it is with the kind that last was tried with all.
    """

    def __init__(self, most: int) -> None:
        """`most` threads, at least 1; beside it one less, half as many and one are tried."""
        self._counts = sorted({most, max(most - 1, 1), max(most // 2, 1), 1}, reverse=True)
        self._now = most
        self._quickest: dict[int, dict[int, float]] = defaultdict(dict)
        self._reference: dict[int, float] = {}
        self._slowness = {count: deque([1.0], _RECENT) for count in self._counts}
        self._since_tried = dict.fromkeys(self._counts, 0.0)

    def choose(self, rows: int) -> int:
        """Threads for a step of so many rows; now and then another number, to see how it does."""
        times = self._quickest_times(self._quickest[rows.bit_length()])
        if not times:
            return self._now
        expected = {count: time * median(self._slowness[count]) for count, time in times.items()}
        self._now = min(expected, key=lambda count: expected[count])
        for count in self._counts:
            if count not in times:
                return count
            # Steps may be slow for what they feed, too: then another number is as slow.
            loss = max(
                times[count] * self._slowness[count][-1] - expected[self._now],
                times[count] - times[self._now],
            )
            if count != self._now and loss <= self._share(count) * self._since_tried[count]:
                return count
        return self._now

    def record(self, rows: int, threads: int, seconds: float) -> None:
        """A step of so many rows took `seconds` with so many threads."""
        quickest = self._quickest[rows.bit_length()]
        quickest[threads] = min(seconds, quickest.get(threads, seconds) * _DRIFT)
        if len(quickest) == len(self._counts):
            self._reference = quickest
        self._slowness[threads].append(seconds / quickest[threads])
        for count in self._counts:
            self._since_tried[count] += seconds
        self._since_tried[threads] = 0.0

    def _share(self, count: int) -> float:
        """Of the time, what trials of so many threads may cost."""
        if count > self._now:
            return MORE_SHARE
        return FEWER_SHARE if self._slowness[self._now][-1] >= DISTURBED else 0.0

    def _quickest_times(self, own: dict[int, float]) -> dict[int, float]:
        """Those of a kind of steps, and what the reference says of numbers not tried with it.

        Fewer threads are taken to do no better than their share: wide steps are bound by arithmetic
        where narrow ones are by memory.
        """
        if not own or not self._reference:
            return own
        known = max(own)
        scale = own[known] / self._reference[known]
        return {
            count: own.get(count, max(time * scale, own[known] * known / count))
            for count, time in self._reference.items()
        }

"""Chooses the number of threads with which the next step computes.

The threads of a step synchronize some two hundred times. If another process takes one of their
cores, each synchronization waits milliseconds for the operating system. On a quiet machine a step
took 18 ms with two threads. Beside one busy process it took 1,190 ms with two threads, and 36 ms
with one. So a step may use fewer threads than it is allowed to. A row's bits are the same with any
number of threads.
"""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median

MORE_SHARE = 0.04
"""Maximum share of time for trials of more threads: other processes take cores only for a while."""
FEWER_SHARE = 0.005
"""Maximum share of time for trials of fewer threads."""
DISTURBED = 1.25
"""Minimum slowness at which fewer threads are tried: a trial delays the tokens of all sequences."""

_RECENT = 3
"""The number of steps whose median slowness counts, since one slow step says nothing."""
_DRIFT = 1.005
"""Factor by which the quickest known time of a kind grows per step, since contexts get longer."""


class ThreadChoice:
    """Chooses the number of threads with the least expected time.

    Steps whose numbers of rows have the same power of two are of one kind. The slowness of a step
    is its time as a multiple of the quickest of its kind and number of threads. The expected time
    is that quickest time, times the recent slowness with that number of threads. If a number of
    threads was not tried with a kind, its quickest time is scaled from the kind that was last tried
    with all numbers.
    """

    def __init__(self, most: int) -> None:
        """`most`: the largest number, at least 1. Also tried: most - 1, most / 2, and 1."""
        self._counts = sorted({most, max(most - 1, 1), max(most // 2, 1), 1}, reverse=True)
        self._now = most
        self._quickest: dict[int, dict[int, float]] = defaultdict(dict)
        self._reference: dict[int, float] = {}
        self._slowness = {count: deque([1.0], _RECENT) for count in self._counts}
        self._since_tried = dict.fromkeys(self._counts, 0.0)

    def choose(self, rows: int) -> int:
        """The number of threads for a step of `rows` rows: the best one, or another as a trial."""
        times = self._quickest_times(self._quickest[rows.bit_length()])
        if not times:
            return self._now
        expected = {count: time * median(self._slowness[count]) for count, time in times.items()}
        self._now = min(expected, key=lambda count: expected[count])
        for count in self._counts:
            if count not in times:
                return count
            # A step may be slow because of the tokens that it feeds. It would then be as slow with
            # another number of threads.
            loss = max(
                times[count] * self._slowness[count][-1] - expected[self._now],
                times[count] - times[self._now],
            )
            if count != self._now and loss <= self._share(count) * self._since_tried[count]:
                return count
        return self._now

    def record(self, rows: int, threads: int, seconds: float) -> None:
        """Note that a step of `rows` rows took `seconds` with `threads` threads."""
        quickest = self._quickest[rows.bit_length()]
        quickest[threads] = min(seconds, quickest.get(threads, seconds) * _DRIFT)
        if len(quickest) == len(self._counts):
            self._reference = quickest
        self._slowness[threads].append(seconds / quickest[threads])
        for count in self._counts:
            self._since_tried[count] += seconds
        self._since_tried[threads] = 0.0

    def _share(self, count: int) -> float:
        """The maximum share of time for trials of `count` threads."""
        if count > self._now:
            return MORE_SHARE
        return FEWER_SHARE if self._slowness[self._now][-1] >= DISTURBED else 0.0

    def _quickest_times(self, own: dict[int, float]) -> dict[int, float]:
        """The quickest times of a kind of steps; numbers that were not tried are estimated.

        The estimate assumes that fewer threads are slower at least in proportion. Wide steps are
        bound by arithmetic, but the estimate may come from narrow steps, which are bound by memory.
        """
        if not own or not self._reference:
            return own
        known = max(own)
        scale = own[known] / self._reference[known]
        return {
            count: own.get(count, max(time * scale, own[known] * known / count))
            for count, time in self._reference.items()
        }

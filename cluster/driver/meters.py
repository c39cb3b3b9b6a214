"""The driver's counters of workers, gaps and its own time; and the names of shards in them."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass, field

from paceline.generation import TopologyWorker, WorkerStats

FAILURES = 6
"""Attempts in a row that a worker's process must fail, each with work at hand, before the
controller ends it. A process that fails its steps ends itself after three."""


def shard_name(rank: int, *, group: int) -> str:
    """ "shard-0", or "replica-1.shard-0" in a target group other than the first.

    It does not depend on the number of groups, which may change.
    """
    return f"replica-{group}.shard-{rank}" if group else f"shard-{rank}"


@dataclass(slots=True)
class WorkerMeter:
    """Counters of one worker since the driver began. They outlive its connections."""

    name: str
    kind: str
    address: str
    pid: int = 0
    connected: bool = False
    busy_seconds: float = 0.0
    passes: int = 0
    tokens: int = 0
    joins: int = 0
    malformed: int = 0
    suspect: bool = False
    overruns: int = 0
    shares: int = 0
    model: str = ""
    """The name of its checkpoint; "" for none, and before it was reached."""
    rules: frozenset[str] = frozenset()
    """The rules that a drafter can draft for."""
    trouble: str = ""
    """Why the worker could not be used at the last try."""
    failures: int = 0
    """Attempts in a row in which its process answered but was of no use."""
    _failing_since: float = 0.0
    _passes_before: int = 0
    _away_since: float = field(default_factory=time.monotonic)

    def join(
        self, *, kind: str, pid: int, model: str = "", rules: frozenset[str] = frozenset()
    ) -> None:
        """The worker can be used from now on. `rules`: those that a drafter can draft for."""
        if pid != self.pid:
            self.failures = 0
        self._passes_before = self.passes
        self.kind = kind
        self.pid = pid
        self.model = model
        self.rules = rules
        self.connected = True
        self.joins += 1

    def leave(self, *, asked: bool = True) -> None:
        """The stream ended or was never there. The worker cannot be used until it joins again.

        `asked`: whether there was work for it. A stream with work but without a pass is a failure.
        """
        if self.connected:
            self.connected = False
            self._away_since = time.monotonic()
            if asked and self.passes == self._passes_before:
                self.failed()

    def failed(self) -> None:
        """The worker's process described itself, and then was of no use."""
        if not self.failures:
            self._failing_since = time.monotonic()
        self.failures += 1

    def is_failing(self, seconds: float) -> bool:
        """Whether its process is there but has been of no use for `seconds`."""
        return self.failures >= FAILURES and time.monotonic() - self._failing_since >= seconds

    def passed(self, busy_seconds: float, overrun_seconds: float, *, shares: int = 0) -> None:
        self.failures = 0
        self.shares = shares
        self.busy_seconds += busy_seconds
        self.passes += 1
        self.overruns += overrun_seconds > 0

    def stats(self) -> WorkerStats:
        return WorkerStats(
            name=self.name,
            kind=self.kind,
            address=self.address,
            pid=self.pid,
            connected=self.connected,
            busy_seconds=self.busy_seconds,
            passes=self.passes,
            tokens=self.tokens,
            reconnects=max(0, self.joins - 1),
            malformed=self.malformed,
            suspect=self.suspect,
            overruns=self.overruns,
            shares=self.shares if self.connected else 0,
            away_seconds=0.0 if self.connected else time.monotonic() - self._away_since,
            trouble="" if self.connected else self.trouble,
        )

    def placed(self) -> TopologyWorker:
        return TopologyWorker(self.name, self.kind, self.model, self.address, self.connected)


@dataclass(slots=True)
class GapMeter:
    """The time between two forward passes of a target group while there was work.

    Only steps that were sent at once upon the previous answer count.
    """

    _gaps: deque[float] = field(default_factory=lambda: deque(maxlen=1000))
    _counts_next: set[int] = field(default_factory=set)

    def step_sent(self, group: int, *, upon_answer: bool) -> None:
        """A step was sent. `upon_answer`: at once upon the previous answer."""
        if upon_answer:
            self._counts_next.add(group)
        else:
            self._counts_next.discard(group)

    def step_answered(self, group: int, gap_seconds: float) -> None:
        """A step was answered, with the gap before it that the shard measured."""
        if group in self._counts_next and gap_seconds > 0:
            self._gaps.append(gap_seconds)

    @property
    def median_ms(self) -> float:
        """Median of the last 1,000 gaps; 0: there were none."""
        return statistics.median(self._gaps) * 1000 if self._gaps else 0.0


@dataclass(slots=True)
class DriverTimeMeter:
    """The processor time that the driver's event loop spends on a step, with everything it does.

    It is measured from one answer of the target to the next, if the step was sent at once upon the
    first.
    """

    _times: deque[float] = field(default_factory=lambda: deque(maxlen=1000))
    _last: float | None = None

    def step_answered(self, thread_seconds: float) -> float:
        """A step was answered. `thread_seconds`: total processor time of the loop's thread.

        Returns the time since the previous answer; 0 if that is not counted.
        """
        seconds = 0.0
        if self._last is not None:
            seconds = thread_seconds - self._last
            self._times.append(seconds)
        self._last = thread_seconds
        return seconds

    def pause(self) -> None:
        self._last = None

    @property
    def median_ms(self) -> float:
        """Median of the last 1,000 times; 0: there were none."""
        return statistics.median(self._times) * 1000 if self._times else 0.0

"""How long things take, as `auto` forecasts them: steps, beside drafting or not, and draft passes.

Estimates are milliseconds.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from cluster.decoding.events import StepDone, is_believable
from cluster.decoding.instructions import RunStep

_DECAY = 0.95
"""The weight of a mean's values is multiplied by this when a new value comes."""

_KINDS = ("chain", "branches", "between")
"""Kinds of draft passes: with branches or without, and between steps."""

_MOST_PAUSE_MS, _PAUSE_RISES = 1.0, 0.05
"""A drafter that pauses for longer had nothing to do. A pause longer than the estimate moves it by
this share only, since a message may be late."""

_LATEST = 9
"""A time is the median of this many latest values. Five in a row decide it, so a hiccup of the host
has no effect, nor have the first passes of a process, which take many times as long.
"""

_NEAR = 1.25
"""Sizes that differ by at most this factor take about the same time."""

FIRST_TOLL, _MOST_TOLL = 0.3, 2.0
"""What a millisecond of drafting adds to a step on the same host: assumed before it is seen, as if
they took turns; and the most that is believed."""


@dataclass(slots=True)
class Mean:
    """A decayed mean; the first values count in full."""

    value: float = 0.0
    weight: float = 0.0

    def add(self, value: float, *, of: int = 1) -> None:
        """Add one of the `of` values that arrive together."""
        self.weight = self.weight * (1 - (1 - _DECAY) / of) + 1
        self.value += (value - self.value) / self.weight


class _Seen:
    """The latest times of about one size: alone on the host, or with `beside` ms of drafting."""

    __slots__ = ("_times",)

    def __init__(self) -> None:
        self._times: deque[tuple[float, float, float]] = deque(maxlen=_LATEST)

    def add(self, size: float, ms: float, beside: float) -> None:
        self._times.append((size, ms, beside))

    def keep(self, most: int) -> None:
        """Forget all but the latest `most`."""
        while len(self._times) > most:
            self._times.popleft()

    def __len__(self) -> int:
        return len(self._times)

    @property
    def size(self) -> float:
        return sum([size for size, _, _ in self._times]) / len(self)

    @property
    def beside(self) -> float:
        return sum([beside for _, _, beside in self._times]) / len(self)

    def ms(self, toll: float = 0.0) -> float:
        """The median time, without `toll` for each millisecond of drafting."""
        return max(0.0, median([ms - toll * beside for _, ms, beside in self._times]))


class TimesBySize:
    """Milliseconds that something takes as a function of its size: for example, a step by its rows.

    A larger size never takes less time: where the means say otherwise, neighbors are averaged (pool
    adjacent violators). Between sizes that were seen the time is linear. Beyond the largest it
    rises with the mean slope from the smallest to the largest, so that a size which was never tried
    looks neither free nor worse than what is known. Below the smallest it stays.

    Times beside drafting are kept apart from those without. The `toll`, which a millisecond of
    drafting adds, follows from sizes that were seen both ways.
    """

    def __init__(self, *, nothing_takes_none: bool = False) -> None:
        """`nothing_takes_none`: size 0 is known to take no time."""
        self._origin = [(0.0, 0.0, 1.0)] if nothing_takes_none else []
        self._alone: dict[int, _Seen] = {}
        self._beside: dict[int, _Seen] = {}
        self._line: list[tuple[float, float]] = []
        self._toll: float | None = None
        self._stale = True

    def add(self, size: float, ms: float, *, beside: float = 0.0) -> None:
        """Add a time for `size`, with `beside` milliseconds of drafting meanwhile."""
        kind = self._beside if beside else self._alone
        kind.setdefault(_size_class(size), _Seen()).add(size, ms, beside)
        self._stale = True

    def keep(self, most: int) -> None:
        """Forget all but the latest `most` times of each size, because they are old."""
        for seen in (*self._alone.values(), *self._beside.values()):
            seen.keep(most)
        self._stale = True

    @property
    def known(self) -> bool:
        """Whether any size was seen."""
        return bool(self._alone or self._beside)

    @property
    def largest(self) -> float:
        """The largest size that was seen. Some size must have been seen."""
        return self._points()[-1][0]

    @property
    def toll(self) -> float | None:
        """What a millisecond of drafting adds; None: not known yet."""
        self._points()
        return self._toll

    def ms(self, size: float) -> float:
        """The time at this size without drafting. Some size must have been seen."""
        return _on(self._points(), size)

    def ms_per_unit(self, size: float) -> float:
        """The time that one more adds at this size: the mean over the next tenth of the size."""
        more = max(1.0, size / 10)
        return max(0.0, (self.ms(size + more) - self.ms(size)) / more)

    def _points(self) -> list[tuple[float, float]]:
        if not self._stale:
            return self._line
        self._stale = False
        longer = drafting = 0.0
        alone = _rising(
            [(one.size, one.ms(), float(len(one))) for _, one in sorted(self._alone.items())]
        )
        for seen in self._beside.values():
            if alone and alone[0][0] / _NEAR <= seen.size <= _NEAR * alone[-1][0]:
                longer += len(seen) * (seen.ms() - _on(alone, seen.size))
                drafting += len(seen) * seen.beside
        self._toll = min(_MOST_TOLL, max(0.0, longer / drafting)) if drafting else None
        # While the toll is not known, times beside drafting say little of those without.
        kinds = (self._alone, self._beside) if drafting or not self._alone else (self._alone,)
        pools = list(self._origin)
        for one in sorted({one for kind in kinds for one in kind}):
            both = [kind[one] for kind in kinds if one in kind]
            weight = sum([len(seen) for seen in both])
            size = sum([len(seen) * seen.size for seen in both]) / weight
            ms = sum([len(seen) * seen.ms(self._toll or 0.0) for seen in both]) / weight
            pools.append((size, ms, float(weight)))
        self._line = _rising(pools)
        return self._line


@dataclass(slots=True)
class DraftTimes:
    """One drafter: its passes, and how soon it answers a verdict.

    Passes that grow branches are kept apart, and so are those between steps: on a shared host a
    pass beside a working target takes longer. The price of a kind that is not in use must be known.
    """

    tokens_a_pass: Mean = field(default_factory=Mean)
    """Candidates of the chain that a pass gives a sequence."""
    num_passes: int = 0
    pause_ms: float = 0.0
    """Time between two passes when there is work: the drafter sends answers and reads messages."""
    _passes: dict[str, TimesBySize] = field(default_factory=dict)
    _restarts: dict[str, _Seen] = field(default_factory=dict)
    _heard_at: float | None = None

    def heard(self, now: float, pass_ms: float) -> None:
        """The answer of a pass of `pass_ms` arrived at `now`, in seconds: learn the pause."""
        before, self._heard_at = self._heard_at, now
        pause_ms = _MOST_PAUSE_MS if before is None else (now - before) * 1000 - pass_ms
        if 0.0 <= pause_ms < _MOST_PAUSE_MS:
            more_ms = pause_ms - self.pause_ms
            self.pause_ms += more_ms * (_PAUSE_RISES if self.pause_ms and more_ms > 0 else 1.0)

    def add_pass(self, *, batch: int, tokens: int, ms: float, kind: str = "chain") -> None:
        """A pass gave chains of `tokens` candidates in all to `batch` sequences.

        `kind`: "chain", "branches" or "between" steps.
        """
        self.num_passes += 1
        self._passes.setdefault(kind, TimesBySize()).add(batch, ms)
        self.tokens_a_pass.add(tokens / batch)

    def add_restart(self, ms: float, *, kind: str = "chain") -> None:
        """It took `ms` from a verdict to the first candidate that continues it."""
        self._restarts.setdefault(kind, _Seen()).add(1, ms, 0.0)

    def keep(self, most: int) -> None:
        """Forget all but the latest `most` times of each kind, because they are old."""
        for passes in self._passes.values():
            passes.keep(most)
        for restarts in self._restarts.values():
            restarts.keep(most)

    @property
    def known(self) -> bool:
        """Whether a pass was seen."""
        return bool(self._passes)

    def pass_ms(self, batch: int, *, kind: str = "chain", rows: int | None = None) -> float:
        """Time of a pass of this kind; of another kind, if none was seen. Some must have been.

        `batch`: sequences in the pass. `rows`: its tokens. A pass of a batch never takes less time
        than a chain's pass of as many rows: the first passes that grow branches have fewer rows.
        """
        seen = next(one for one in (kind, *_KINDS) if one in self._passes)
        if seen != kind:
            return self._passes[seen].ms(rows or batch)
        ms = self._passes[kind].ms(batch)
        if rows and batch > 1 and "chain" in self._passes:
            ms = max(ms, self._passes["chain"].ms(rows))
        return ms

    def covers(self, batch: int) -> bool:
        """Whether a pass was seen for `batch` sequences or more, or for at most a fifth fewer."""
        return any(_NEAR * one.largest >= batch for one in self._passes.values())

    def restart_ms(self, batch: int, *, kind: str = "chain") -> float:
        """Time of a restart. Before any was seen, its time without a round trip.

        Drafting that runs ahead has half a pass to finish first, on average.
        """
        seen = next((one for one in (kind, *_KINDS) if one in self._restarts), None)
        half_ms = self.pass_ms(batch, kind=kind) / 2
        if seen is None:
            return (2 if kind == "between" else 3) * half_ms
        ms = max(half_ms, self._restarts[seen].ms())  # It may stem from smaller batches.
        if kind == "between" != seen:
            return max(2 * half_ms, ms - half_ms)
        return ms + half_ms if seen == "between" != kind else ms

    @property
    def round_trip_ms(self) -> float:
        """A restart without its pass and half of the pass before it; 0: not known yet."""
        return max(0.0, self.restart_ms(1) - 1.5 * self.pass_ms(1)) if self.known else 0.0


@dataclass(slots=True)
class ObservedStep:
    """A step of the batch, sent and answered at these seconds.

    `sequences` that decode, `rows` in all; `proposals` that arrived meanwhile; `drafts`: whether a
    drafter on the target's host had work meanwhile, and `drafting_ms` of it that are known.
    """

    sent_at: float = 0.0
    done_at: float = math.inf
    sequences: int = 1
    rows: int = 1
    has_prefill: bool = False
    proposals: int = 0
    drafts: bool = False
    drafting_ms: float = 0.0
    device_ms: float = 0.0

    @property
    def ms(self) -> float:
        """From sending it to its answer."""
        return (self.done_at - self.sent_at) * 1000

    def drafted(self, now: float, pass_ms: float) -> None:
        """A pass of a drafter on the target's host ended."""
        begin = max(self.sent_at, now - pass_ms / 1000)
        self.drafting_ms += max(0.0, min(now, self.done_at) - begin) * 1000


class StepModel:
    """How long a step takes: a sum of parts.

    The device computes rows. Messages and the driver take time for each sequence. The answer waits
    while the driver reads the proposals that arrived meanwhile. Both are longer beside drafting on
    the same host. No step takes less time than the driver works (`StepDone.driver_seconds`).

    A step is learned once the next one is answered, since passes beside it end after it.
    """

    def __init__(self) -> None:
        self.last = ObservedStep()
        self._recent: deque[float] = deque(maxlen=3)  # ms of decode-only steps without drafting
        self._device = TimesBySize()  # by rows
        self._host = TimesBySize()  # by sequences
        self._reading = TimesBySize(nothing_takes_none=True)  # by proposals
        self._work = TimesBySize()  # the driver's, by sequences and proposals since the last answer
        self._heard = 0  # proposals since the last answer
        self._sent: dict[tuple[int, int], ObservedStep] = {}  # by target group and number
        self._unlearned: ObservedStep | None = None
        self._drafted_before = False  # beside the step before the one that is learned

    @property
    def known(self) -> bool:
        """Whether a step was seen."""
        return self._device.known

    @property
    def known_toll(self) -> bool:
        """Whether it is known what drafting on the host adds to a step."""
        return self._device.toll is not None

    @property
    def recent_ms(self) -> float:
        """The time of the latest steps without drafting; 0: there was none."""
        return median(self._recent) if self._recent else 0.0

    @property
    def is_idle(self) -> bool:
        """Whether no step is in flight."""
        return not self._sent

    def ms(
        self, rows: float, sequences: float, proposals: float = 0.0, drafting_ms: float = 0.0
    ) -> float:
        """The time of a step during which `proposals` arrive. Some step must have been seen.

        `drafting_ms`: for which a drafter on its host computes; at most the whole step.
        """
        alone = max(self._device.ms(rows) + self._host.ms(sequences), 1e-3)
        toll = self.toll
        longer = toll * drafting_ms
        if toll and drafting_ms > alone:
            longer = min(longer, alone * toll / (1 - toll) if toll < 1 else longer)
        ms = alone + longer + self._reading.ms(proposals)
        return max(ms, self._work.ms(sequences + proposals)) if self._work.known else ms

    @property
    def toll(self) -> float:
        """What a millisecond of drafting on the host adds to a step."""
        device = self._device.toll
        return FIRST_TOLL if device is None else device + (self._host.toll or 0.0)

    def ms_per_row(self, sequences: float, rows: float) -> float:
        """What a row adds to a step, in the mean over those beyond one for each sequence."""
        rows = max(rows, sequences + 1)
        return (self._device.ms(rows) - self._device.ms(sequences)) / (rows - sequences)

    def estimates(self) -> dict[str, float]:
        """For reports: the time of a step like the last one, and what one more unit adds to it."""
        if not self.known:
            return {}
        last = self.last
        return {
            "step_ms": self.ms(last.rows, last.sequences, last.proposals, last.drafting_ms),
            "step_ms_per_candidate": self._device.ms_per_unit(last.rows),
            "step_ms_per_proposal": self._reading.ms_per_unit(last.proposals),
            "step_ms_per_drafting_ms": self.toll,
        }

    def sent(self, now: float, step: RunStep, *, drafts: bool) -> None:
        """A step goes out at `now`. `drafts`: a drafter on the target's host has work."""
        # A step of the same group that is still here was lost with its target.
        self._sent = {key: one for key, one in self._sent.items() if key[0] != step.group}
        rows = sum([len(part.token_ids) for part in step.slices])
        decoding = [len(part.token_ids) for part in step.slices if part.decodes]
        self._sent[step.group, step.step] = ObservedStep(
            sent_at=now,
            sequences=max(1, len(decoding)),
            rows=rows,
            has_prefill=rows > sum(decoding),
            drafts=drafts,
        )

    def heard(self, now: float, proposals: int, beside_ms: float) -> None:
        """Proposals arrived. `beside_ms`: of a pass on the target's host; 0: it has its own."""
        self._heard += proposals
        for step in self._sent.values():
            step.proposals += proposals
        if beside_ms:
            for step in (*self._sent.values(), *([self._unlearned] if self._unlearned else [])):
                step.drafted(now, beside_ms)

    def answered(self, event: StepDone) -> None:
        """A step was answered: learn from the one before it."""
        step = self._sent.pop((event.group, event.step), None)
        if step is None:
            return
        step.done_at = event.now
        step.device_ms = min(max(0.0, event.step_seconds * 1000), step.ms)
        if event.driver_seconds > 0:
            self._work.add(step.sequences + self._heard, event.driver_seconds * 1000)
        self._heard = 0
        self.last = step
        learned, self._unlearned = self._unlearned or (None if self.known else step), step
        if learned is not None and is_believable(learned.ms / 1000):
            self._learn(learned)

    def _learn(self, step: ObservedStep) -> None:
        beside = min(step.ms, step.drafting_ms)
        drafted_before, self._drafted_before = self._drafted_before, step.drafts
        if (step.drafts or drafted_before) and not beside:
            return  # A pass may have gone on meanwhile that is not heard of yet.
        ms = step.ms
        if not beside and not step.has_prefill:
            self._recent.append(ms)
        self._device.add(step.rows, step.device_ms, beside=beside)
        besides_ms = ms - step.device_ms
        host_ms = max(0.0, besides_ms - self._reading.ms(step.proposals))
        self._host.add(step.sequences, host_ms, beside=beside)
        if step.proposals:
            host_ms = self._host.ms(step.sequences) + (self._host.toll or 0.0) * beside
            self._reading.add(step.proposals, max(0.0, besides_ms - host_ms))


def _slope(line: Sequence[tuple[float, float]]) -> float:
    """The slope from the first point to the last; 0 for a single point."""
    (left, low), (right, high) = line[0], line[-1]
    return (high - low) / (right - left) if right > left else 0.0


def _on(line: Sequence[tuple[float, float]], size: float) -> float:
    """The value at a size: linear between points, constant before the first."""
    index = bisect_right(line, (size, math.inf))
    if index == 0:
        return line[0][1]
    if index == len(line):
        size_before, ms_before = line[-1]
        return ms_before + (size - size_before) * _slope(line)
    (left, low), (right, high) = line[index - 1], line[index]
    return low + (size - left) * (high - low) / (right - left)


def _size_class(size: float) -> int:
    """The class of a size. Up to 8 each size is a class; then each class is a fifth larger."""
    return round(size) if size <= 8 else 8 + int(math.log(size / 8) / math.log(1.2))


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

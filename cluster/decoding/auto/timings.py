"""How long steps and draft passes take, as `auto` forecasts them, in milliseconds."""

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

_LATEST = 9
"""A time is the median of this many latest values. Five in a row decide it, so a hiccup of the host
has no effect, nor have the first passes of a process, which take many times as long.
"""

FIRST_TOLL, _MOST_TOLL = 0.3, 0.9
"""What a millisecond of drafting adds to a step on the same host: assumed before it is seen, as if
they took turns; and the most that is believed."""


@dataclass(slots=True)
class Mean:
    """A decayed mean; the first values count in full."""

    value: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> None:
        """Add a value."""
        self.weight = self.weight * _DECAY + 1
        self.value += (value - self.value) / self.weight


class TimesBySize:
    """Milliseconds that something takes as a function of its size: for example, a step by its rows.

    A larger size never takes less time: where the medians say otherwise, neighbors are averaged
    (pool adjacent violators). Between sizes that were seen the time is linear. Beyond the largest
    it rises with the mean slope from the smallest to the largest, so that a size which was never
    tried looks neither free nor worse than what is known. Below the smallest it stays.
    """

    def __init__(self) -> None:
        self._seen: dict[int, deque[tuple[float, float]]] = {}  # by class: sizes and times
        self._line: list[tuple[float, float]] = []

    def add(self, size: float, ms: float) -> None:
        """Add a time for `size`."""
        self._seen.setdefault(_size_class(size), deque(maxlen=_LATEST)).append((size, ms))
        self._line = []

    def keep(self, most: int) -> None:
        """Forget all but the latest `most` times of each size, because they are old."""
        for seen in self._seen.values():
            while len(seen) > most:
                seen.popleft()
        self._line = []

    @property
    def known(self) -> bool:
        """Whether any size was seen."""
        return bool(self._seen)

    def covers(self, size: float) -> bool:
        """Whether this size was seen or lies between such, or is larger by at most a quarter."""
        return self.known and self._points()[0][0] <= size <= 1.25 * self._points()[-1][0]

    def ms(self, size: float) -> float:
        """The time at this size. Some size must have been seen."""
        line = self._points()
        index = bisect_right(line, (size, math.inf))
        if index == 0:
            return line[0][1]
        (left, low), (right, high) = line[index - 1], line[min(index, len(line) - 1)]
        if index == len(line):
            left, low = line[0]
        slope = (high - low) / (right - left) if right > left else 0.0
        return high + (size - right) * slope

    def ms_per_unit(self, size: float) -> float:
        """The time that one more adds at this size: the mean over the next tenth of the size."""
        more = max(1.0, size / 10)
        return (self.ms(size + more) - self.ms(size)) / more

    def _points(self) -> list[tuple[float, float]]:
        if not self._line:
            pools = []
            for _, seen in sorted(self._seen.items()):
                sizes, times = zip(*seen, strict=True)
                pools.append((sum(sizes) / len(sizes), median(times), len(seen)))
            self._line = _rising(pools)
        return self._line


@dataclass(slots=True)
class Step:
    """A step of the batch, sent and answered at these seconds.

    `sequences` that decode, `rows` in all; `proposals` that arrived meanwhile; `drafts`: whether a
    drafter on the target's host had work meanwhile, and `drafting_ms` of it that are known.
    """

    number: int = 0
    sent_at: float = 0.0
    done_at: float = math.inf
    sequences: int = 1
    rows: int = 1
    has_prefill: bool = False
    drafts: bool = False
    drafting_ms: float = 0.0
    proposals: int = 0

    @property
    def ms(self) -> float:
        """From sending it to its answer."""
        return (self.done_at - self.sent_at) * 1000


class StepModel:
    """How long a step takes by its rows, and what drafting on the target's host adds.

    A step is learned once the next one is answered, since passes beside it end after it.
    """

    def __init__(self) -> None:
        self.last = Step()
        """The last step that was answered."""
        self._alone = TimesBySize()
        self.toll = FIRST_TOLL
        """What a millisecond of drafting on the host adds to a step."""
        self.knows_toll = False
        self._beside: deque[Step] = deque(maxlen=_LATEST)  # The latest steps beside drafting.
        self._sent: dict[int, Step] = {}  # By target group.
        self._besides = TimesBySize()  # For reports: what is not the device's, by proposals.

    @property
    def known(self) -> bool:
        """Whether a step was seen."""
        return self._alone.known

    def ms(self, rows: float, drafting_ms: float = 0.0) -> float:
        """The time of a step beside which a drafter on its host has work for `drafting_ms`.

        Some step must have been seen.
        """
        alone = max(self._alone.ms(rows), 1e-3)
        return min(alone + self.toll * drafting_ms, alone / (1 - self.toll))

    def ms_per_row(self, sequences: float, rows: float) -> float:
        """What a row adds to a step, in the mean over those beyond one for each sequence."""
        rows = max(rows, sequences + 1)
        return (self._alone.ms(rows) - self._alone.ms(sequences)) / (rows - sequences)

    def estimates(self) -> dict[str, float]:
        """For reports: the time of a step like the last one, and what one more unit adds to it."""
        if not self.known:
            return {}
        return {
            "step_ms": self.ms(self.last.rows, self.last.drafting_ms),
            "step_ms_per_candidate": self._alone.ms_per_unit(self.last.rows),
            "step_ms_per_proposal": self._besides.ms_per_unit(self.last.proposals),
            "step_ms_per_drafting_ms": self.toll,
        }

    def sent(self, now: float, step: RunStep, *, drafts: bool) -> None:
        """A step goes out at `now`. `drafts`: a drafter on the target's host has work."""
        decoding = [len(part.token_ids) for part in step.slices if part.decodes]
        rows = sum([len(part.token_ids) for part in step.slices])
        self._sent[step.group] = Step(
            number=step.step,
            sent_at=now,
            sequences=max(1, len(decoding)),
            rows=rows,
            has_prefill=rows > sum(decoding),
            drafts=drafts,
        )

    def heard(self, now: float, proposals: int, beside_ms: float) -> None:
        """Proposals arrived. `beside_ms`: of a pass on the target's host; 0: it has its own."""
        for step in self._sent.values():
            step.proposals += proposals
        if not beside_ms:
            return
        for step in (self.last, *self._sent.values()):
            begin = max(step.sent_at, now - beside_ms / 1000)
            step.drafting_ms += max(0.0, min(now, step.done_at) - begin) * 1000

    def answered(self, event: StepDone) -> None:
        """A step was answered: learn from the one before it."""
        step = self._sent.get(event.group)
        if step is None or step.number != event.step:
            return
        del self._sent[event.group]
        before, self.last = self.last, step
        step.done_at = event.now
        if is_believable(before.ms / 1000):
            self._learn(before)
        if is_believable(step.ms / 1000):
            if not self.known:
                self._alone.add(step.rows, step.ms)
            device_ms = max(0.0, event.step_seconds * 1000)
            self._besides.add(step.proposals, max(0.0, step.ms - device_ms))

    def _learn(self, step: Step) -> None:
        alone = self._alone
        if not step.drafting_ms:
            if not step.drafts:  # Else a pass goes on that is not heard of yet.
                alone.add(step.rows, step.ms)
        elif self.knows_toll and not alone.covers(step.rows):
            alone.add(step.rows, max(0.0, step.ms - self.toll * min(step.ms, step.drafting_ms)))
        elif not step.has_prefill:
            self._beside.append(step)
        tolls = [
            (one.ms - alone.ms(one.rows)) / min(one.ms, one.drafting_ms)
            for one in self._beside
            if alone.covers(one.rows)
        ]
        if tolls:
            self.knows_toll, self.toll = True, min(_MOST_TOLL, max(0.0, median(tolls)))


@dataclass(slots=True)
class DraftTimes:
    """One drafter: its passes, and how soon it answers a verdict."""

    tokens_a_pass: Mean = field(default_factory=Mean)
    """Candidates of the chain that a pass gives a sequence."""
    num_passes: int = 0
    _passes: dict[bool, TimesBySize] = field(default_factory=dict)
    """By sequences in the pass; apart: those that grow branches."""
    round_trip_ms: Mean = field(default_factory=Mean)
    """A restart without its passes."""

    def add_pass(self, sequences: int, tokens: float, ms: float, grows: bool) -> None:
        """A pass took `ms` and gave `sequences` chains of `tokens` candidates in all.

        `grows`: it grew branches as well.
        """
        self.num_passes += 1
        self._passes.setdefault(grows, TimesBySize()).add(sequences, ms)
        self.tokens_a_pass.add(tokens / sequences)

    def add_restart(self, ms: float, sequences: int, *, waits: bool) -> None:
        """It took `ms` from a verdict to the first candidate that continues it.

        `waits`: the drafter waits for verdicts.
        """
        self.round_trip_ms.add(max(0.0, ms - _restart_passes(waits) * self.pass_ms(sequences)))

    def restart_ms(self, sequences: int, *, waits: bool = False, grows: bool = False) -> float:
        """Time from a verdict to the first candidate that continues it, as in `add_restart`."""
        passes_ms = _restart_passes(waits) * self.pass_ms(sequences, grows=grows)
        return self.round_trip_ms.value + passes_ms

    def keep(self, most: int) -> None:
        """Forget all but the latest `most` times of each kind, because they are old."""
        for passes in self._passes.values():
            passes.keep(most)

    @property
    def known(self) -> bool:
        """Whether a pass was seen."""
        return bool(self._passes)

    def covers(self, sequences: int) -> bool:
        """Whether the passes that were seen tell the time of a pass for this many sequences."""
        return any(one.covers(sequences) for one in self._passes.values())

    def pass_ms(self, sequences: int, *, grows: bool = False) -> float:
        """Time of a pass of this kind; of the other, if none was seen. Some must have been."""
        seen = self._passes.get(grows) or self._passes[not grows]
        return seen.ms(sequences)


def _restart_passes(waits: bool) -> float:
    """Unless it waits for verdicts, a drafter has half a pass to finish first, on average."""
    return 1.0 if waits else 1.5


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

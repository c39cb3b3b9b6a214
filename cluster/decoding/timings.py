"""Estimates of times: steps, draft passes and the driver's own work; and how busy devices were.

Workers report how long a pass took. All other times are by the driver's clock. What uses them:

- `StepCosts`: the pace of drafters (policy.py), and what drafters need to stop by cost.
- `DriverShare`: how many branches drafters may grow (policy.py, MOST_CHAINS).
- `StepModel`, `DraftTimes`: the forecasts of `auto` (auto/beliefs.py).
- `Utilization`: only the statistics.

What a prompt adds to a step is in prefill.py. How the speeds of drafters compare is in drafters.py.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from cluster.decoding.events import StepDone, is_believable
from cluster.decoding.instructions import RunStep

_MEAN_DECAY = 0.95
"""The weight of a mean's values is multiplied by this when a new value comes."""

_APART = 1.2
"""The slope below the smallest size is taken to the next size that is larger by this factor."""

_MOST_PAUSE_MS, _PAUSE_RISES = 1.0, 0.05
"""A drafter that pauses for longer had nothing to do. A pause longer than the estimate moves it by
this share only, since a message may be late."""

_LATE = 2.0
"""A pass or a restart counts as at most this many times the mean. A longer time means that the host
was busy with other work."""

_LEAST_STEP_MS = 1e-3
"""Lower bound on the forecast time of a step."""

_SURPRISE_MS, _SURPRISE = 1.0, 1.3
"""A step that exceeds the forecast by this time and this factor is a surprise."""

_NO_HICCUP = 3
"""After this many surprises in a row, steps are assumed to take that long from now on."""

_STEP_DECAY = 0.98
"""The weight of earlier steps in `StepCosts` is multiplied by this at each step."""

_WORK_DECAY = 0.6
"""The weight of earlier steps in `DriverShare` is multiplied by this at each step."""

_MOST_WORK = 0.85
"""The driver should work at most this share of its time, since an answer waits while it is busy."""

MOST_READ = 128.0
"""Upper bound on the chains and branches of all drafters together: the most that two drafters grow
(policy.py, MOST_CHAINS). More of them are hardly of use."""


@dataclass(slots=True)
class Mean:
    """A decayed mean; the first values count in full."""

    value: float = 0.0
    weight: float = 0.0

    def add(self, value: float, *, of: int = 1) -> None:
        """Add one of the `of` values that arrive together."""
        self.weight = self.weight * (1 - (1 - _MEAN_DECAY) / of) + 1
        self.value += (value - self.value) / self.weight

    @property
    def known(self) -> bool:
        """Whether there was a value."""
        return self.weight > 0


class TimesBySize:
    """Milliseconds that something takes as a function of its size: for example, a step by its rows.

    A larger size never takes less time: where the means say otherwise, neighbors are averaged (pool
    adjacent violators). Between sizes that were seen the time is linear. Beyond the largest it
    rises with the mean slope from the smallest to the largest, so that a size which was never tried
    looks neither free nor worse than what is known. Below the smallest it falls with the slope
    between the smallest two.
    """

    def __init__(self, *, nothing_takes_none: bool = False) -> None:
        """`nothing_takes_none`: size 0 is known to take no time."""
        self._origin = [(0.0, 0.0, 1.0)] if nothing_takes_none else []
        self._seen: dict[int, tuple[Mean, Mean]] = {}
        self._line: list[tuple[float, float]] = []
        self._stale = True

    def add(self, size: int, ms: float, *, afresh: bool = False) -> None:
        """Add a time of `ms` for `size`. `afresh`: forget the sizes that contradict it."""
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
        """Whether any size was seen."""
        return bool(self._seen)

    @property
    def largest(self) -> float:
        """The largest size that was seen; 0: none was."""
        return self._points()[-1][0] if self._seen else 0.0

    def ms(self, size: float) -> float:
        """The time at this size. Some size must have been seen."""
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
        """The time that one more adds at this size: the mean over the next tenth of the size."""
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
class StepCosts:
    """The mean time of a decode-only step, what a candidate adds to it, and the token rate.

    Decayed sums over steps. The time is the device's (`StepDone.step_seconds`).
    """

    _weight: float = 0.0
    _candidates: float = 0.0
    _ms: float = 0.0
    _candidates_squared: float = 0.0
    _candidates_ms: float = 0.0
    _tokens: float = 0.0
    _elapsed_ms: float = 0.0
    _last_done: float | None = None

    def add(self, now: float, *, candidates: int, step_seconds: float, tokens: int) -> None:
        """A step of `candidates` was answered at `now`; it committed `tokens`."""
        step_ms = step_seconds * 1000
        self._weight = self._weight * _STEP_DECAY + 1
        self._candidates = self._candidates * _STEP_DECAY + candidates
        self._ms = self._ms * _STEP_DECAY + step_ms
        self._candidates_squared = self._candidates_squared * _STEP_DECAY + candidates**2
        self._candidates_ms = self._candidates_ms * _STEP_DECAY + candidates * step_ms
        if self._last_done is not None:
            self._tokens = self._tokens * _STEP_DECAY + tokens
            self._elapsed_ms = self._elapsed_ms * _STEP_DECAY + (now - self._last_done) * 1000
        self._last_done = now

    def pause(self) -> None:
        """The target has nothing to do: the time until the next answer does not count."""
        self._last_done = None

    @property
    def tokens_per_ms(self) -> float:
        """Committed tokens per millisecond; 0: not known yet."""
        return self._tokens / self._elapsed_ms if self._elapsed_ms > 0 else 0.0

    @property
    def step_ms(self) -> float:
        """The mean; 0: not known yet."""
        return self._ms / self._weight if self._weight else 0.0

    @property
    def ms_per_candidate(self) -> float:
        """The time that one more candidate adds to a step, at least 0 (least squares)."""
        spread = self._weight * self._candidates_squared - self._candidates**2
        if spread <= 1e-9 * max(1.0, self._candidates_squared):
            return 0.0
        slope = (self._weight * self._candidates_ms - self._candidates * self._ms) / spread
        return max(0.0, slope)


@dataclass(slots=True)
class DriverShare:
    """The number of chains whose proposals the driver has time to read.

    Each further drafter sends a message per pass, and in it a proposal for each of its chains.
    There is one driver: if it has no time left, the target waits for it, and more drafters slow
    everything down. Simulated with 12 sequences and 4 drafters, `fanout` has less than 0.8 of the
    speed of one drafter without this bound, and more than 0.95 with it.
    """

    most_chains: float = MOST_READ
    """The chains and branches that would fill the driver's working time if they were all of its
    work. The estimate is too small while there are few chains, because of the driver's other work.
    It improves over steps as the number of chains grows.
    """
    _worked: float = 0.0
    _chain_seconds: float = 0.0
    _last: float | None = None

    def answered(
        self, now: float, *, driver_seconds: float, step_seconds: float, chains: int
    ) -> None:
        """A step was answered at `now`.

        `driver_seconds`: time that the driver worked since the previous answer. `chains`: chains
        and branches that drafters may grow at present.
        """
        before, self._last = self._last, now
        if before is None or driver_seconds <= 0:
            return
        # In any time beyond this, there was nothing to do.
        elapsed = min(now - before, step_seconds + driver_seconds)
        self._worked = _WORK_DECAY * self._worked + driver_seconds
        self._chain_seconds = _WORK_DECAY * self._chain_seconds + chains * elapsed
        if self._chain_seconds:
            self.most_chains = min(MOST_READ, _MOST_WORK * self._chain_seconds / self._worked)


@dataclass(slots=True)
class DraftTimes:
    """One drafter, as `auto` forecasts it: its passes, and how soon it answers a verdict.

    Passes and restarts that grow branches are kept apart: a choice between `chain` and `fanout`
    must know the price of the one that is not in use. In simulations of a drafter whose pass takes
    0.3 to 1 ms longer per row, `auto` is 9 % slower where both kinds share a mean. Passes are kept
    by batch as well: with one mean, simulated `auto` falls below 0.98 of plain decoding with 64
    sequences, a far drafter and few candidates accepted (0.979; by batch 0.982).
    """

    tokens_a_pass: Mean = field(default_factory=Mean)
    """Candidates of the chain that a pass gives a sequence."""
    branch_messages: Mean = field(default_factory=Mean)
    """Proposals of a pass for a sequence that has branches, without the first proposal."""
    pause_ms: float = 0.0
    """Time between two passes when there is work: the drafter sends answers and reads messages."""
    # The key: whether branches are grown. Passes are kept by batch too.
    _passes: dict[bool, TimesBySize] = field(default_factory=dict)
    _restarts: dict[bool, Mean] = field(default_factory=dict)
    _heard_at: float | None = None

    def heard(self, now: float, pass_ms: float) -> None:
        """The answer of a pass of `pass_ms` arrived at `now`, in seconds: learn the pause."""
        before, self._heard_at = self._heard_at, now
        pause_ms = _MOST_PAUSE_MS if before is None else (now - before) * 1000 - pass_ms
        if 0.0 <= pause_ms < _MOST_PAUSE_MS:
            more_ms = pause_ms - self.pause_ms
            self.pause_ms += more_ms * (_PAUSE_RISES if self.pause_ms and more_ms > 0 else 1.0)

    def add_pass(self, *, batch: int, tokens: int, ms: float, branches: bool = False) -> None:
        """A pass gave chains of `tokens` candidates in all to `batch` sequences."""
        passes = self._passes.setdefault(branches, TimesBySize())
        passes.add(batch, min(ms, _LATE * passes.ms(batch)) if passes.known else ms)
        self.tokens_a_pass.add(tokens / batch)

    def add_restart(self, ms: float, *, branches: bool = False) -> None:
        """It took `ms` from a verdict to the first candidate that continues it."""
        mean = self._restarts.setdefault(branches, Mean())
        mean.add(min(ms, _LATE * mean.value) if mean.known else ms)

    @property
    def known(self) -> bool:
        """Whether a pass was seen."""
        return bool(self._passes)

    def pass_ms(self, batch: int, *, branches: bool = False) -> float:
        """Time of a pass, with branches or without. If none was seen, that of the other kind.

        `batch`: sequences in the pass. Some pass must have been seen.
        """
        return (self._passes.get(branches) or self._passes[not branches]).ms(batch)

    def restart_ms(self, *, branches: bool = False) -> float:
        """Time of a restart, likewise. Before any was seen, its time without a round trip."""
        mean = self._restarts.get(branches) or self._restarts.get(not branches)
        return 1.5 * self.pass_ms(1, branches=branches) if mean is None else mean.value

    @property
    def round_trip_ms(self) -> float:
        """A restart without its pass and half of the pass before it; 0: not known yet."""
        return max(0.0, self.restart_ms() - 1.5 * self.pass_ms(1)) if self.known else 0.0


@dataclass(slots=True)
class ObservedStep:
    """A step of the batch. `ms`: from sending it to its answer.

    `sequences` that decode, the `decoding_rows` that are fed for them, and all `rows`;
    `proposals` that arrived while the step was computed.
    """

    sent_at: float = 0.0
    sequences: int = 1
    decoding_rows: int = 1
    rows: int = 1
    proposals: int = 0
    ms: float = 0.0

    @property
    def has_prefill(self) -> bool:
        """Whether prompts were computed in it too."""
        return self.rows > self.decoding_rows


class StepModel:
    """How long a step takes, as `auto` forecasts it: a sum of parts, in milliseconds.

    The device computes rows. Messages and the driver take time for each sequence. The answer waits
    while the driver reads the proposals that arrived meanwhile. So each verified candidate costs a
    row, and drafting costs time whether candidates are verified or not. No step takes less time
    than the driver works (`StepDone.driver_seconds`).

    Each part is needed: without a part of its own for sequences, simulated `auto` is up to 6 %
    slower (one sequence, near drafter); without the driver's work it drafts for 64 sequences where
    that keeps the driver from the target.
    """

    def __init__(self) -> None:
        self.last = ObservedStep()
        self._device = TimesBySize()  # by rows
        self._host = TimesBySize()  # by sequences
        self._reading = TimesBySize(nothing_takes_none=True)  # by proposals
        self._work = TimesBySize()  # the driver's, by sequences and proposals since the last answer
        self._heard = 0  # proposals since the last answer
        self._surprises = 0  # in a row
        self._sent: dict[tuple[int, int], ObservedStep] = {}  # by target group and number

    @property
    def known(self) -> bool:
        """Whether a step was seen."""
        return self._device.known

    def ms(
        self, rows: float, sequences: float, proposals: float, *, hopeful: bool = False
    ) -> float:
        """The time of a step during which `proposals` arrive. Some step must have been seen.

        `hopeful`: assume that more proposals than ever arrived take no longer to read.
        """
        if hopeful:
            proposals = min(proposals, self._reading.largest)
        device_ms, host_ms = self._device.ms(rows), self._host.ms(sequences)
        ms = max(device_ms + host_ms + self._reading.ms(proposals), _LEAST_STEP_MS)
        return max(ms, self._work.ms(sequences + proposals)) if self._work.known else ms

    def estimates(self) -> dict[str, float]:
        """For reports: the time of a step like the last one, and what one more unit adds to it."""
        if not self.known:
            return {}
        last = self.last
        return {
            "step_ms": self.ms(last.rows, last.sequences, last.proposals),
            "step_ms_per_candidate": self._device.ms_per_unit(last.rows),
            "step_ms_per_proposal": self._reading.ms_per_unit(last.proposals),
        }

    def sent(self, now: float, step: RunStep) -> None:
        """A step goes out at `now`."""
        # A step of the same group that is still here was lost with its target.
        self._sent = {key: one for key, one in self._sent.items() if key[0] != step.group}
        decoding = [part for part in step.slices if part.decodes]
        self._sent[step.group, step.step] = ObservedStep(
            sent_at=now,
            sequences=max(1, len(decoding)),
            decoding_rows=sum(len(part.token_ids) for part in decoding),
            rows=sum(len(part.token_ids) for part in step.slices),
        )

    def heard(self, proposals: int) -> None:
        """This many proposals arrived."""
        self._heard += proposals
        for step in self._sent.values():
            step.proposals += proposals

    def answered(self, event: StepDone) -> bool:
        """Learn from an answered step. Returns whether it took far longer than forecast."""
        step = self._sent.pop((event.group, event.step), None)
        if step is None:
            return False
        step.ms = (event.now - step.sent_at) * 1000
        self.last = step
        if event.driver_seconds > 0:
            self._work.add(step.sequences + self._heard, event.driver_seconds * 1000)
        self._heard = 0
        if not is_believable(event.now - step.sent_at):
            return False
        forecast_ms = step.ms
        if self.known:
            forecast_ms = self.ms(step.rows, step.sequences, step.proposals)
        surprising_ms = max(_SURPRISE * forecast_ms, forecast_ms + _SURPRISE_MS)
        surprises = step.ms > surprising_ms
        self._surprises = self._surprises + 1 if surprises else 0
        afresh = self._surprises >= _NO_HICCUP
        # Until then it may be a hiccup of the host, so it counts as the longest time without one.
        ms = step.ms if afresh else min(step.ms, surprising_ms)
        device_ms = min(max(0.0, event.step_seconds * 1000), ms)
        besides_ms = ms - device_ms
        self._device.add(step.rows, device_ms, afresh=afresh)
        host_ms = max(0.0, besides_ms - self._reading.ms(step.proposals))
        self._host.add(step.sequences, host_ms, afresh=afresh)
        if step.proposals:
            waited_ms = max(0.0, besides_ms - self._host.ms(step.sequences))
            self._reading.add(step.proposals, waited_ms, afresh=afresh)
        return surprises


@dataclass(frozen=True, slots=True)
class Work:
    """The passes of a device, and their total time."""

    seconds: float = 0.0
    passes: int = 0

    def plus(self, seconds: float) -> Work:
        """This work and one more pass."""
        return Work(self.seconds + seconds, self.passes + 1)

    def since(self, earlier: Work) -> Work:
        """This work without the work done earlier."""
        return Work(self.seconds - earlier.seconds, self.passes - earlier.passes)

    @property
    def pass_seconds(self) -> float:
        """Mean time of a pass; 0: there was none."""
        return self.seconds / self.passes if self.passes else 0.0


@dataclass(frozen=True, slots=True)
class Mark:
    """The work that was done by a moment."""

    now: float
    target: Work
    drafters: Mapping[str, Work]
    group_seconds: float


@dataclass(frozen=True, slots=True)
class Shares:
    """Idle shares and efficiency over a span of time. None: no such device, or nothing to compare.

    `efficiency`: committed tokens over those of an ideal drafter (`ideal_tokens_per_step`).
    """

    seconds: float = 0.0
    target_idle: float | None = None
    drafter_idle: float | None = None
    efficiency: float | None = None


@dataclass(slots=True)
class Utilization:
    """Work of all devices since the scheduler began; `target` is that of all its groups."""

    target: Work = field(default_factory=Work)
    drafters: dict[str, Work] = field(default_factory=dict)
    at_work_seconds: float = 0.0
    _at_work_since: float | None = None
    _group_seconds_at_work: float = 0.0
    _num_groups: int = 1
    _scaled_at: float = 0.0
    _group_seconds_before: float = 0.0
    _efficiency_seconds: float = 0.0
    _rated_seconds: float = 0.0

    def scale(self, now: float, num_groups: int) -> None:
        """The target has this number of groups from now on."""
        self._group_seconds_before = self._group_seconds(now)
        self._scaled_at, self._num_groups = now, num_groups

    def _group_seconds(self, now: float) -> float:
        """The time of all groups of the target together, since the clock's 0."""
        return self._group_seconds_before + (now - self._scaled_at) * self._num_groups

    def observe(self, now: float, *, at_work: bool) -> None:
        """Note whether there is work at hand from now on."""
        if self._at_work_since is not None:
            self.at_work_seconds += now - self._at_work_since
            self._group_seconds_at_work += (now - self._at_work_since) * self._num_groups
        self._at_work_since = now if at_work else None

    def stepped(self, seconds: float) -> None:
        """The target answered a step."""
        self.target = self.target.plus(seconds)

    def drafted(self, drafter: str, seconds: float) -> None:
        """A drafter answered a pass."""
        self.drafters[drafter] = self.drafters.get(drafter, Work()).plus(seconds)

    def mark(self, now: float) -> Mark:
        """The work that is done by now."""
        return Mark(now, self.target, dict(self.drafters), self._group_seconds(now))

    def of_request(
        self,
        mark: Mark,
        now: float,
        *,
        drafters: Collection[str],
        tokens: int,
        acceptance: float | None,
    ) -> Shares:
        """The shares from `mark`, a request's first token, to its last.

        `tokens`: those committed meanwhile.
        """
        elapsed = now - mark.now
        if elapsed <= 0:
            return Shares()
        target = self.target.since(mark.target)
        works = [
            self.drafters.get(name, Work()).since(mark.drafters.get(name, Work()))
            for name in drafters
        ]
        idle = [1 - work.seconds / elapsed for work in works]
        efficiency = None
        if target.seconds:
            passes = [work.pass_seconds for work in works if work.seconds]
            ideal = ideal_tokens_per_step(
                acceptance or 0.0,
                step_seconds=target.pass_seconds,
                draft_seconds=min(passes, default=0.0),
            )
            if ideal < math.inf:
                efficiency = tokens * target.pass_seconds / elapsed / ideal
                self._efficiency_seconds += efficiency * elapsed
                self._rated_seconds += elapsed
        return Shares(
            seconds=elapsed,
            target_idle=_share(
                1 - target.seconds / (self._group_seconds(now) - mark.group_seconds)
            ),
            drafter_idle=_share(sum(idle) / len(idle)) if idle else None,
            efficiency=efficiency,
        )

    def of_all(self, drafters: Collection[str]) -> Shares:
        """The shares of all time with work at hand. `drafters`: those that can be used now.

        The efficiency is the mean over finished requests, weighted by their time.
        """
        elapsed = self.at_work_seconds
        if elapsed <= 0:
            return Shares()
        idle = [1 - self.drafters.get(name, Work()).seconds / elapsed for name in drafters]
        rated = self._rated_seconds
        return Shares(
            seconds=elapsed,
            target_idle=_share(1 - self.target.seconds / self._group_seconds_at_work),
            drafter_idle=_share(sum(idle) / len(idle)) if idle else None,
            efficiency=self._efficiency_seconds / rated if rated else None,
        )


def ideal_tokens_per_step(acceptance: float, *, step_seconds: float, draft_seconds: float) -> float:
    """Tokens in the time of a step if every outcome had been foreseen.

    The bounds are the acceptance and the drafter's pace. `draft_seconds` 0: no bound by pace.
    """
    by_pace = step_seconds / draft_seconds + 1 if draft_seconds else math.inf
    by_acceptance = 1 / (1 - acceptance) if acceptance < 1 else math.inf
    return min(by_pace, by_acceptance)


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))


def _slope(line: Sequence[tuple[float, float]]) -> float:
    """The slope from the first point to the last; 0 for a single point."""
    (left, low), (right, high) = line[0], line[-1]
    return (high - low) / (right - left) if right > left else 0.0


def _size_class(size: int) -> int:
    """The class of a size. Up to 8 each size is a class; then each class is a fifth larger."""
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

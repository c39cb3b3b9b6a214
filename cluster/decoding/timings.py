"""Estimates of times: steps and the driver's own work; and how busy devices were.

Workers report how long a pass took. All other times are by the driver's clock. What uses them:

- `StepCosts`: the pace of drafters (policy.py), and what drafters need to stop by cost.
- `DriverShare`: how many branches drafters may grow (policy.py, MOST_CHAINS).
- `Utilization`: only the statistics.

What `auto` forecasts by is in auto/timings.py. What a prompt adds to a step is in prefill.py. How
the speeds of drafters compare is in drafters.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

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
        if before is None or driver_seconds <= 0 or not chains:
            return  # Work without chains says nothing of theirs.
        # In any time beyond this, there was nothing to do.
        elapsed = min(now - before, step_seconds + driver_seconds)
        self._worked = _WORK_DECAY * self._worked + driver_seconds
        self._chain_seconds = _WORK_DECAY * self._chain_seconds + chains * elapsed
        self.most_chains = min(MOST_READ, _MOST_WORK * self._chain_seconds / self._worked)


@dataclass(frozen=True, slots=True)
class Work:
    """The passes of a device, and their total time."""

    seconds: float = 0.0
    passes: int = 0

    def plus(self, seconds: float) -> Work:
        return Work(self.seconds + seconds, self.passes + 1)

    def since(self, earlier: Work) -> Work:
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
        self.target = self.target.plus(seconds)

    def drafted(self, drafter: str, seconds: float) -> None:
        self.drafters[drafter] = self.drafters.get(drafter, Work()).plus(seconds)

    def mark(self, now: float) -> Mark:
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

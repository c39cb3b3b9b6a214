"""How busy the devices were while there was work, and how near that comes to the ideal.

Workers tell durations of passes; the rest is the driver's clock. All times are seconds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Work:
    """Passes of a device and what they took together."""

    seconds: float = 0.0
    passes: int = 0

    def plus(self, seconds: float) -> Work:
        """With one pass more."""
        return Work(self.seconds + seconds, self.passes + 1)

    def since(self, earlier: Work) -> Work:
        """Without what had been done by then."""
        return Work(self.seconds - earlier.seconds, self.passes - earlier.passes)

    @property
    def pass_seconds(self) -> float:
        """The mean; 0: there was none."""
        return self.seconds / self.passes if self.passes else 0.0


@dataclass(frozen=True, slots=True)
class Mark:
    """What had been done at a moment."""

    now: float
    target: Work
    drafters: Mapping[str, Work]


@dataclass(frozen=True, slots=True)
class Shares:
    """Of a stretch of time. None: nobody to idle, or nothing to compare."""

    seconds: float = 0.0
    target_idle: float | None = None
    drafter_idle: float | None = None
    efficiency: float | None = None


@dataclass(slots=True)
class Utilisation:
    """Work of all devices since the scheduler began; `target` is that of all its groups."""

    num_groups: int = 1
    target: Work = field(default_factory=Work)
    drafters: dict[str, Work] = field(default_factory=dict)
    at_work_seconds: float = 0.0
    _at_work_since: float | None = None
    _efficiency_seconds: float = 0.0
    _rated_seconds: float = 0.0

    def observe(self, now: float, *, at_work: bool) -> None:
        """From now on there is work at hand, or none."""
        if self._at_work_since is not None:
            self.at_work_seconds += now - self._at_work_since
        self._at_work_since = now if at_work else None

    def stepped(self, seconds: float) -> None:
        """The target answered a step."""
        self.target = self.target.plus(seconds)

    def drafted(self, drafter: str, seconds: float) -> None:
        """A drafter answered a pass."""
        self.drafters[drafter] = self.drafters.get(drafter, Work()).plus(seconds)

    def mark(self, now: float) -> Mark:
        """What has been done by now."""
        return Mark(now, self.target, dict(self.drafters))

    def of_request(
        self,
        mark: Mark,
        now: float,
        *,
        drafters: Collection[str],
        tokens: int,
        acceptance: float | None,
    ) -> Shares:
        """From `mark`, a request's first token, to its last; `tokens` were committed meanwhile."""
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
            target_idle=_share(1 - target.seconds / elapsed / self.num_groups),
            drafter_idle=_share(sum(idle) / len(idle)) if idle else None,
            efficiency=efficiency,
        )

    def of_all(self, drafters: Collection[str]) -> Shares:
        """Of all time with work at hand; the efficiency is the mean of finished requests' by time.

        `drafters`: those that can be used now.
        """
        elapsed = self.at_work_seconds
        if elapsed <= 0:
            return Shares()
        idle = [1 - self.drafters.get(name, Work()).seconds / elapsed for name in drafters]
        rated = self._rated_seconds
        return Shares(
            seconds=elapsed,
            target_idle=_share(1 - self.target.seconds / elapsed / self.num_groups),
            drafter_idle=_share(sum(idle) / len(idle)) if idle else None,
            efficiency=self._efficiency_seconds / rated if rated else None,
        )


def ideal_tokens_per_step(acceptance: float, *, step_seconds: float, draft_seconds: float) -> float:
    """Tokens in the time of a step if every outcome had been foreseen (ALGORITHMS.md section 5).

    Bounded by acceptance, and by the drafter's pace; `draft_seconds` 0: not by pace.
    """
    by_pace = step_seconds / draft_seconds + 1 if draft_seconds else math.inf
    by_acceptance = 1 / (1 - acceptance) if acceptance < 1 else math.inf
    return min(by_pace, by_acceptance)


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))

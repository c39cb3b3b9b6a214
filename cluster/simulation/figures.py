"""Figures of a simulated load: rates, latencies, and where the time went."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.simulation.fleet import Answered, Fleet, Snapshot


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the target groups' time.

    `prefill`: steps with prefill, a part of `busy`. `waiting`: without a step although there were
    requests. `idle`: without requests.
    """

    busy: float
    prefill: float
    waiting: float
    idle: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of the measured requests. Times are milliseconds, as (median, 99th percentile).

    `ttft_ms`: from asking to the first token. `token_ms`: of a request, from its first token to its
    last one, a token. `completed_per_second`: requests. `draft_used`: of the candidates that
    drafters computed (counts.py); None without drafters.
    """

    tokens_per_second: float
    completed_per_second: float
    ttft_ms: tuple[float, float]
    token_ms: tuple[float, float]
    acceptance_length: float
    target: Shares
    drafter_busy: float | None
    draft_used: float | None
    requests: int


@dataclass(frozen=True, slots=True)
class Course:
    """The part of a fleet's run that is measured.

    `begin`, `end`: the moments between which it was in full swing. `answered`: requests that ended
    after `begin`.
    """

    begin: Snapshot
    end: Snapshot
    answered: Sequence[Answered]
    num_targets: int
    num_drafters: int

    @property
    def seconds(self) -> float:
        """Seconds between the two moments."""
        return self.end.time - self.begin.time

    def rate(self, name: str) -> float:
        """Growth per second of a counter of the snapshots, by its name."""
        grown: float = getattr(self.end, name) - getattr(self.begin, name)
        return grown / self.seconds


def course_of(fleet: Fleet) -> Course:
    """The measured part: from a first generation of answers until the last request was asked.

    For a load too small for that: from begin to end.
    """
    begin, end = fleet.in_full_swing
    answered = [one for one in fleet.answered if one.last_at > begin.time]
    return Course(begin, end, answered, len(fleet.targets), len(fleet.drafters))


def figures_of(courses: Sequence[Course]) -> Figures:
    """Figures of fleets side by side: rates added up, percentiles over all requests."""
    targets = sum(one.num_targets for one in courses)
    drafters = sum(one.num_drafters for one in courses)
    answered = [request for one in courses for request in one.answered]

    def rate(name: str) -> float:
        return sum(one.rate(name) for one in courses)

    busy, waiting = rate("target_busy") / targets, rate("target_waiting") / targets
    drafted = rate("drafted")
    return Figures(
        tokens_per_second=rate("committed"),
        completed_per_second=rate("answered"),
        ttft_ms=_percentiles([one.first_at - one.arrived for one in answered]),
        token_ms=_percentiles([_per_token(one) for one in answered]),
        acceptance_length=sum(len(one.token_ids) for one in answered)
        / sum(one.steps for one in answered),
        target=Shares(
            busy, rate("target_prefill") / targets, waiting, max(0.0, 1 - busy - waiting)
        ),
        drafter_busy=rate("drafter_busy") / drafters if drafters else None,
        draft_used=rate("used") / drafted if drafted else None,
        requests=len(answered),
    )


def in_swing_of(together: Sequence[Answered]) -> tuple[int, float]:
    """Tokens and seconds of requests asked together, from when all have a token until the end."""
    begin = max(one.first_at for one in together)
    tokens = sum(num for one in together for at, num in one.arrivals if at > begin)
    return tokens, max(one.last_at for one in together) - begin


def _per_token(one: Answered) -> float:
    return (one.last_at - one.first_at) / max(1, len(one.token_ids) - 1)


def _percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    """Median and 99th percentile, each the nearest rank, in milliseconds."""
    ordered = sorted(seconds)
    median, high = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.99))
    return 1000 * median, 1000 * high

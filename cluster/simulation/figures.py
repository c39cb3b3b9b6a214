"""What a simulated load came to: rates, latencies, and where the time went."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.simulation.fleet import Answered, Fleet, Snapshot


@dataclass(frozen=True, slots=True)
class Shares:
    """Of the target groups' time. `prefill` is a part of `busy`: steps that prefill as well.

    `waiting`: without a step though there were requests; `idle`: without any.
    """

    busy: float
    prefill: float
    waiting: float
    idle: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Times are milliseconds; (median, 99th percentile) of the requests that were measured.

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
    """What is kept of a fleet that has run: two moments between which it was in full swing, the
    requests that were answered after the first, and its devices.
    """

    begin: Snapshot
    end: Snapshot
    answered: Sequence[Answered]
    num_targets: int
    num_drafters: int

    @property
    def seconds(self) -> float:
        """Between the moments."""
        return self.end.time - self.begin.time

    def rate(self, name: str) -> float:
        """By how much a count of the snapshots grew in a second."""
        grown: float = getattr(self.end, name) - getattr(self.begin, name)
        return grown / self.seconds


def course_of(fleet: Fleet) -> Course:
    """From a first generation of answers on until the last request was asked; of a load too small
    for that, from begin to end.
    """
    begin, end = fleet.in_full_swing
    answered = [one for one in fleet.answered if one.last_at > begin.time]
    return Course(begin, end, answered, len(fleet.targets), len(fleet.drafters))


def figures_of(courses: Sequence[Course]) -> Figures:
    """Of fleets side by side: their rates together, the percentiles of all requests."""
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
    """Tokens and seconds of requests asked together: from when each has one to the last of all."""
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

"""What a simulated load came to: rates, latencies, and where the time went."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.simulation.fleet import Answered, Fleet


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
    drafters computed (counts.py); None without drafters. `measured_seconds`: virtual time.
    """

    tokens_per_second: float
    completed_per_second: float
    ttft_ms: tuple[float, float]
    token_ms: tuple[float, float]
    acceptance_length: float
    target: Shares
    drafter_busy: float | None
    draft_used: float | None
    measured_seconds: float
    requests: int


def figures_of(fleet: Fleet) -> Figures:
    """Of a load that has run, while it was in full swing: from a first generation of answers on,
    until the last request was asked. Of a load too small for that, from begin to end.
    """
    begin, end = fleet.in_full_swing
    seconds = end.time - begin.time
    answered = [one for one in fleet.answered if one.last_at > begin.time]
    group_seconds = seconds * len(fleet.targets)
    busy = (end.target_busy - begin.target_busy) / group_seconds
    waiting = (end.target_waiting - begin.target_waiting) / group_seconds
    drafted = end.drafted - begin.drafted
    return Figures(
        tokens_per_second=(end.committed - begin.committed) / seconds,
        completed_per_second=(end.answered - begin.answered) / seconds,
        ttft_ms=_percentiles([one.first_at - one.arrived for one in answered]),
        token_ms=_percentiles([_per_token(one) for one in answered]),
        acceptance_length=sum(len(one.token_ids) for one in answered)
        / sum(one.steps for one in answered),
        target=Shares(
            busy,
            (end.target_prefill - begin.target_prefill) / group_seconds,
            waiting,
            max(0.0, 1 - busy - waiting),
        ),
        drafter_busy=(end.drafter_busy - begin.drafter_busy) / (seconds * len(fleet.drafters))
        if fleet.drafters
        else None,
        draft_used=(end.used - begin.used) / drafted if drafted else None,
        measured_seconds=seconds,
        requests=len(answered),
    )


def _per_token(one: Answered) -> float:
    return (one.last_at - one.first_at) / max(1, len(one.token_ids) - 1)


def _percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    """Median and 99th percentile, each the nearest rank, in milliseconds."""
    ordered = sorted(seconds)
    median, high = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.99))
    return 1000 * median, 1000 * high

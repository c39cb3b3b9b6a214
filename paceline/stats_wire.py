"""Between the wire and plain values: the counters of InferenceService (inference.proto)."""

from __future__ import annotations

from typing import Any

from paceline.generation import RequestStats, SpeculationStats, Stats, WorkerLife, WorkerStats
from paceline.v1 import inference_pb2

_SHARES = ("target_idle", "drafter_idle", "efficiency")
_LISTS = ("drafted_at", "tried_at", "accepted_at")
_MAPS = ("choices", "estimates")
_NESTED = {"workers", "speculation", "lives"}
_COUNTS = tuple(SpeculationStats.__dataclass_fields__.keys() - {*_SHARES, *_LISTS, *_MAPS})


def request_stats_to_wire(stats: RequestStats) -> inference_pb2.RequestStats:
    """The message of one request's counts."""
    return inference_pb2.RequestStats(
        steps=stats.steps,
        drafted=stats.drafted,
        accepted=stats.accepted,
        acceptance_length=stats.acceptance_length,
        seconds=stats.seconds,
        ttft_seconds=stats.ttft_seconds,
        stopping_state=stats.stopping_state,
        speculation=_speculation_to_wire(stats.speculation),
    )


def request_stats_from_wire(message: inference_pb2.RequestStats) -> RequestStats:
    """The counts of a message."""
    return RequestStats(
        steps=message.steps,
        drafted=message.drafted,
        accepted=message.accepted,
        acceptance_length=message.acceptance_length,
        seconds=message.seconds,
        ttft_seconds=message.ttft_seconds,
        stopping_state=dict(message.stopping_state),
        speculation=_speculation_from_wire(message.speculation),
    )


def stats_to_wire(stats: Stats) -> inference_pb2.StatsResponse:
    """The message of the server's counters."""
    response = inference_pb2.StatsResponse(speculation=_speculation_to_wire(stats.speculation))
    for name in Stats.__dataclass_fields__.keys() - _NESTED:
        setattr(response, name, getattr(stats, name))
    for worker in stats.workers:
        message = response.workers.add()
        for name in WorkerStats.__dataclass_fields__:
            setattr(message, name, getattr(worker, name))
    for life in stats.lives:
        response.lives.add(
            **{name: getattr(life, name) for name in WorkerLife.__dataclass_fields__}
        )
    return response


def stats_from_wire(response: inference_pb2.StatsResponse) -> Stats:
    """The server's counters, of a message."""
    counters = {
        name: getattr(response, name) for name in Stats.__dataclass_fields__.keys() - _NESTED
    }
    workers = tuple(
        WorkerStats(**{name: getattr(worker, name) for name in WorkerStats.__dataclass_fields__})
        for worker in response.workers
    )
    return Stats(
        **counters,
        workers=workers,
        speculation=_speculation_from_wire(response.speculation),
        lives=tuple(map(_life_from_wire, response.lives)),
    )


def _life_from_wire(message: inference_pb2.WorkerLife) -> WorkerLife:
    return WorkerLife(
        name=message.name,
        restarts=message.restarts,
        last_end=message.last_end,
        next_try_seconds=message.next_try_seconds if message.HasField("next_try_seconds") else None,
        log=message.log,
    )


def _speculation_to_wire(stats: SpeculationStats) -> inference_pb2.SpeculationStats:
    names = (*_COUNTS, *_LISTS, *_SHARES, *_MAPS)
    fields: dict[str, Any] = {name: getattr(stats, name) for name in names}
    return inference_pb2.SpeculationStats(**fields)


def _speculation_from_wire(message: inference_pb2.SpeculationStats) -> SpeculationStats:
    fields: dict[str, Any] = {name: getattr(message, name) for name in _COUNTS}
    fields |= {name: tuple(getattr(message, name)) for name in _LISTS}
    fields |= {name: dict(getattr(message, name)) for name in _MAPS}
    fields |= {
        name: getattr(message, name) if message.HasField(name) else None  # type: ignore[arg-type]
        for name in _SHARES
    }
    return SpeculationStats(**fields)

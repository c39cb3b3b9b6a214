"""The client library of a Paceline server. It needs neither torch nor Ray.

`import paceline` takes a few milliseconds: gRPC is loaded when a client class is first named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.errors import (
    CheckpointError,
    ConfigError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    ModelFetchError,
    OverloadedError,
    PacelineError,
    PromptTooLongError,
    ProtocolError,
    RequestFaultError,
    UnavailableError,
    VocabularyMismatchError,
    WorkerLostError,
)
from paceline.generation import (
    Chunk,
    Completion,
    Finished,
    GenerateEvent,
    GenerateInput,
    Message,
    ModelDescription,
    RequestStats,
    SpeculationStats,
    Started,
    Stats,
    WorkerLife,
    WorkerStats,
)
from paceline.options import GenerateOptions
from paceline.sampling import SamplingParams

if TYPE_CHECKING:
    from paceline.client import AsyncClient, Client

__all__ = [
    "AsyncClient",
    "CheckpointError",
    "Chunk",
    "Client",
    "Completion",
    "ConfigError",
    "DeadlineError",
    "Finished",
    "GenerateEvent",
    "GenerateInput",
    "GenerateOptions",
    "InternalError",
    "InvalidRequestError",
    "Message",
    "ModelDescription",
    "ModelFetchError",
    "OverloadedError",
    "PacelineError",
    "PromptTooLongError",
    "ProtocolError",
    "RequestFaultError",
    "RequestStats",
    "SamplingParams",
    "SpeculationStats",
    "Started",
    "Stats",
    "UnavailableError",
    "VocabularyMismatchError",
    "WorkerLife",
    "WorkerLostError",
    "WorkerStats",
]


def __getattr__(name: str) -> Any:
    """The client classes, loaded on first use."""
    if name in ("AsyncClient", "Client"):
        from paceline import client

        globals()[name] = getattr(client, name)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

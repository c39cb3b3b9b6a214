"""The client library of a Paceline server. It needs neither torch nor Ray.

`import paceline` takes a few milliseconds: gRPC is loaded when a client class is first named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.chat import Chat, Message, ToolCall
from paceline.errors import (
    CheckpointError,
    ConfigError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    ModelFetchError,
    OverloadedError,
    PacelineError,
    PermissionDeniedError,
    PromptTooLongError,
    ProtocolError,
    RateLimitedError,
    RequestFaultError,
    UnauthenticatedError,
    UnavailableError,
    VersionMismatchError,
    VocabularyMismatchError,
    WorkerLostError,
    WrongLifeError,
    WrongServerError,
)
from paceline.generation import (
    Chunk,
    Completion,
    Finished,
    GenerateEvent,
    GenerateInput,
    ModelDescription,
    RequestStats,
    SpeculationStats,
    Started,
    Stats,
    TokenLogprobs,
    Tokens,
    Topology,
    TopologyWorker,
    WorkerLife,
    WorkerStats,
)
from paceline.options import GenerateOptions
from paceline.retries import Retries
from paceline.sampling import SamplingParams
from paceline.structure import Structure, StructureKind

if TYPE_CHECKING:
    from paceline.client import AsyncClient, Client

__all__ = [
    "AsyncClient",
    "Chat",
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
    "PermissionDeniedError",
    "PromptTooLongError",
    "ProtocolError",
    "RateLimitedError",
    "RequestFaultError",
    "RequestStats",
    "Retries",
    "SamplingParams",
    "SpeculationStats",
    "Started",
    "Stats",
    "Structure",
    "StructureKind",
    "TokenLogprobs",
    "Tokens",
    "ToolCall",
    "Topology",
    "TopologyWorker",
    "UnauthenticatedError",
    "UnavailableError",
    "VersionMismatchError",
    "VocabularyMismatchError",
    "WorkerLife",
    "WorkerLostError",
    "WorkerStats",
    "WrongLifeError",
    "WrongServerError",
]


def __getattr__(name: str) -> Any:
    """The client classes, loaded on first use."""
    if name in ("AsyncClient", "Client"):
        from paceline import client

        globals()[name] = getattr(client, name)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Paceline's client library: what a caller of a server imports. Needs neither torch nor Ray."""

from __future__ import annotations

import paceline.quiet_grpc  # noqa: F401  # Before anything that imports gRPC.
from paceline.client import AsyncClient, Client
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
    GenerateOptions,
    Message,
    ModelDescription,
    RequestStats,
    SpeculationStats,
    Started,
    Stats,
    WorkerLife,
    WorkerStats,
)
from paceline.sampling import SamplingParams

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

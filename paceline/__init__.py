"""Paceline's client library: what a caller of a server imports. Needs neither torch nor Ray."""

from __future__ import annotations

from paceline.client import AsyncClient, Client
from paceline.errors import (
    InternalError,
    InvalidRequestError,
    OverloadedError,
    PacelineError,
    PromptTooLongError,
    RequestFaultError,
    UnavailableError,
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
    "Chunk",
    "Client",
    "Completion",
    "Finished",
    "GenerateEvent",
    "GenerateInput",
    "GenerateOptions",
    "InternalError",
    "InvalidRequestError",
    "Message",
    "ModelDescription",
    "OverloadedError",
    "PacelineError",
    "PromptTooLongError",
    "RequestFaultError",
    "RequestStats",
    "SamplingParams",
    "SpeculationStats",
    "Started",
    "Stats",
    "UnavailableError",
    "WorkerLife",
    "WorkerStats",
]

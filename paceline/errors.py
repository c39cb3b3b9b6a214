"""The error tree of Paceline. An error says what was expected, what came, and what to do.

PacelineError
├── InvalidRequestError       a field of a request is wrong; the error names it
│   └── PromptTooLongError    the prompt can never fit the context
├── ConfigError               the configuration is wrong; the error names the key
├── CheckpointError           a checkpoint is missing, broken or of an unsupported kind
├── VocabularyMismatchError   a drafter and the target have different vocabularies
├── VersionMismatchError      a driver and a worker run versions that do not work together
├── ModelFetchError           a model could not be fetched into the cache
├── ProtocolError             a peer broke the contract of proto/paceline/v1
├── RequestFaultError         the target cannot decode this request; do not send it again
├── DeadlineError             the caller's timeout has passed
├── UnauthenticatedError      there is no API key, or none that the server knows
├── PermissionDeniedError     the API key may not do this
├── OverloadedError           a queue is full; try again later
│   └── RateLimitedError      the API key has used what it may; try again later
├── UnavailableError          no server, cluster or worker could be reached or started
│   ├── WorkerLostError       a worker was lost while it was in use
│   ├── WrongLifeError        a process that is over is meant, or speaks, or another one answers
│   └── WrongServerError      what answers at the address is no server of Paceline
└── InternalError             a defect of Paceline
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self


class PacelineError(Exception):
    """Base of all errors that Paceline raises on purpose."""


class InvalidRequestError(PacelineError):
    """A field of a request is wrong. `field` is its name in the public schema."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, message)  # Both, so that it can be pickled.
        self.field = field

    def __str__(self) -> str:
        field, message = self.args
        return f"{field}: {message}"

    def renamed(self, names: Mapping[str, str]) -> Self:
        """The same error, with the field's name by this table, if it has one."""
        return type(self)(names.get(self.field, self.field), self.args[1])


class PromptTooLongError(InvalidRequestError):
    """The prompt can never fit the context."""


class ConfigError(PacelineError):
    """The configuration is wrong."""


class CheckpointError(PacelineError):
    """A checkpoint is missing, broken or of an unsupported kind."""


class VocabularyMismatchError(PacelineError):
    """Drafter and target do not share a vocabulary."""


class VersionMismatchError(PacelineError):
    """Driver and worker run versions of Paceline that do not work together."""


class ModelFetchError(PacelineError):
    """A model could not be fetched into the cache."""


class ProtocolError(PacelineError):
    """A peer broke the wire contract."""


class RequestFaultError(PacelineError):
    """The fields of the request are valid, but the target failed on it, and would fail again."""


class DeadlineError(PacelineError):
    """The caller's timeout has passed. The client cancelled the request."""


class UnauthenticatedError(PacelineError):
    """A call without an API key, or with one that the server does not know."""


class PermissionDeniedError(PacelineError):
    """The server knows the API key, but the key may not do this."""


class OverloadedError(PacelineError):
    """A queue is full. `retry_seconds`: when to try again, if the server says so."""

    def __init__(self, message: str, retry_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class RateLimitedError(OverloadedError):
    """The caller's API key has as many requests as it may, at once or in a minute."""


class UnavailableError(PacelineError):
    """A server, a cluster or a worker could not be reached or started."""


class WorkerLostError(UnavailableError):
    """A worker was lost while it was in use."""


class WrongLifeError(UnavailableError):
    """A message is meant for another life of a process, or comes from a life that is over."""


class WrongServerError(UnavailableError):
    """What answers at the address is no inference server of Paceline."""


class InternalError(PacelineError):
    """A defect of Paceline itself."""


@dataclass(frozen=True, slots=True)
class Outward:
    """An error outside Python: name of the gRPC status, HTTP status, exit code of the command."""

    grpc_code: str
    http_status: int
    exit_code: int


_TABLE: dict[type[PacelineError], Outward] = {
    InvalidRequestError: Outward("INVALID_ARGUMENT", 400, 2),
    ConfigError: Outward("FAILED_PRECONDITION", 500, 2),
    CheckpointError: Outward("FAILED_PRECONDITION", 500, 2),
    VocabularyMismatchError: Outward("FAILED_PRECONDITION", 500, 2),
    VersionMismatchError: Outward("FAILED_PRECONDITION", 500, 2),
    ModelFetchError: Outward("UNAVAILABLE", 503, 3),
    ProtocolError: Outward("INVALID_ARGUMENT", 400, 1),
    RequestFaultError: Outward("FAILED_PRECONDITION", 422, 1),
    DeadlineError: Outward("DEADLINE_EXCEEDED", 504, 3),
    UnauthenticatedError: Outward("UNAUTHENTICATED", 401, 2),
    PermissionDeniedError: Outward("PERMISSION_DENIED", 403, 2),
    OverloadedError: Outward("RESOURCE_EXHAUSTED", 429, 1),
    UnavailableError: Outward("UNAVAILABLE", 503, 3),
    InternalError: Outward("INTERNAL", 500, 1),
}


def outward(error: PacelineError | type[PacelineError]) -> Outward:
    """How to report an error: the table's row of its class or of the nearest ancestor."""
    kind = error if isinstance(error, type) else type(error)
    for ancestor in kind.__mro__:
        if ancestor in _TABLE:
            return _TABLE[ancestor]
    return _TABLE[InternalError]

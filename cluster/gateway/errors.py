"""Errors as OpenAI's clients read them: a status and `{"error": {message, type, param, code}}`.

Below `/v1/messages` they have Anthropic's form: `{"type": "error", "error": {type, message}}`.

`paceline.errors.outward` gives the status. The table here adds OpenAI's names, and the statuses of
errors that only HTTP has.
"""

from __future__ import annotations

import json
import logging
import math
import uuid
from dataclasses import dataclass

from starlette.responses import Response

from cluster.gateway.requests import http_name
from paceline.errors import (
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
    WrongLifeError,
    outward,
)

_log = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 1
"""What `Retry-After` says with 429 and 503 if the error does not. A queue moves on within about a
second."""


MAX_MESSAGE = 2000
"""Most characters of an error's message, which may quote what the caller sent."""


class UnknownModelError(InvalidRequestError):
    """No driver serves the model that a request names."""


class UnknownPathError(PacelineError):
    """There is nothing at this path."""


class WrongMethodError(PacelineError):
    """The path takes another method."""


class BodyTooLargeError(PacelineError):
    """The body of a request has too many bytes."""


class SlowBodyError(PacelineError):
    """The body of a request did not arrive in time."""


@dataclass(frozen=True, slots=True)
class _Row:
    """`type` and `code` of an error. `status`: its HTTP status; None: the one of `outward`."""

    type: str
    code: str
    status: int | None = None


_INVALID = "invalid_request_error"
_TABLE: dict[type[PacelineError], _Row] = {
    InvalidRequestError: _Row(_INVALID, "invalid_value"),
    PromptTooLongError: _Row(_INVALID, "context_length_exceeded"),
    UnknownModelError: _Row(_INVALID, "model_not_found", 404),
    UnknownPathError: _Row(_INVALID, "not_found", 404),
    WrongMethodError: _Row(_INVALID, "method_not_allowed", 405),
    SlowBodyError: _Row(_INVALID, "request_timeout", 408),
    BodyTooLargeError: _Row(_INVALID, "request_too_large", 413),
    RequestFaultError: _Row(_INVALID, "request_fault"),
    UnauthenticatedError: _Row(_INVALID, "invalid_api_key"),
    PermissionDeniedError: _Row("permission_error", "permission_denied"),
    RateLimitedError: _Row("rate_limit_error", "rate_limit_exceeded"),
    OverloadedError: _Row("overloaded_error", "overloaded"),
    UnavailableError: _Row("unavailable_error", "unavailable"),
    # Between a driver and its workers: the caller learns that the server is not ready.
    WrongLifeError: _Row("unavailable_error", "unavailable", 503),
    VersionMismatchError: _Row("unavailable_error", "unavailable", 503),
    ModelFetchError: _Row("unavailable_error", "unavailable"),
    DeadlineError: _Row("timeout_error", "deadline_exceeded"),
    # From a driver this is no fault of the caller: 500, although the class is 400 elsewhere.
    ProtocolError: _Row("server_error", "internal_error", 500),
    PacelineError: _Row("server_error", "internal_error"),
}


_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""By status; other ones are the caller's mistakes below 500, and the server's from there on."""


@dataclass(frozen=True, slots=True)
class HttpError:
    status: int
    message: str
    type: str
    code: str
    param: str | None = None
    retry_seconds: float | None = None

    @property
    def shown(self) -> str:
        message = self.message
        return message if len(message) <= MAX_MESSAGE else f"{message[: MAX_MESSAGE - 3]}..."

    def body(self, **more: object) -> bytes:
        """The JSON object, in ASCII. `more`: what it has beside the error."""
        told = {
            "message": self.shown,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return json.dumps({"error": told, **more}).encode()

    def of_anthropic(self) -> dict[str, object]:
        other = _INVALID if self.status < 500 else "api_error"
        kind = _ANTHROPIC_TYPES.get(self.status, other)
        return {"type": "error", "error": {"type": kind, "message": self.shown}}

    def response(self, path: str = "", **more: object) -> Response:
        """The whole answer to a request that failed before its answer began.

        `path`: of the request, which decides the form.
        """
        headers = {}
        if self.status in (429, 503):
            seconds = RETRY_AFTER_SECONDS if self.retry_seconds is None else self.retry_seconds
            headers["retry-after"] = str(max(1, math.ceil(seconds)))
        if self.status == 401:
            headers["www-authenticate"] = 'Bearer realm="paceline"'
        if self.status in (408, 413):
            headers["connection"] = "close"  # The rest of the body is not read.
        body = self.body(**more)
        if path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/"):
            body = json.dumps(self.of_anthropic()).encode()
        return Response(body, self.status, headers, "application/json")


def http_error(error: Exception) -> HttpError:
    """What to tell a caller. A defect is logged, and the caller gets only its id."""
    kind = type(error)
    row = next((_TABLE[one] for one in kind.__mro__ if one in _TABLE), _TABLE[PacelineError])
    if isinstance(error, PacelineError):
        status = row.status or outward(error).http_status
    else:
        status = outward(InternalError).http_status
    if status == 500:
        number = uuid.uuid4().hex
        _log.error("error %s", number, exc_info=error)
        return HttpError(status, f"internal error {number}; see the log", row.type, row.code)
    if isinstance(error, InvalidRequestError):
        param = http_name(error.field)
        return HttpError(status, f"{param}: {error.args[1]}", row.type, row.code, param)
    wait = error.retry_seconds if isinstance(error, OverloadedError) else None
    return HttpError(status, str(error), row.type, row.code, retry_seconds=wait)

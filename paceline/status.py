"""Errors as gRPC statuses: a server writes them, and a client raises the same error again.

`paceline.errors.outward` gives the status code. Trailing metadata has the name of the error's
class, for a wrong request the name of the field, and for an overload the seconds to wait, if known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from paceline import errors
from paceline.errors import (
    DeadlineError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    PacelineError,
    PermissionDeniedError,
    ProtocolError,
    UnauthenticatedError,
    UnavailableError,
    WrongServerError,
    outward,
)
from paceline.quiet_grpc import grpc

WHOLE_REQUEST = "request"
"""The field of an InvalidRequestError if the status names none."""

FIELD_KEY = "paceline-field"
ERROR_KEY = "paceline-error"
RETRY_KEY = "paceline-retry-after"
"""Seconds to wait before the next try, as a decimal number."""

MAX_RETRY_SECONDS = 3600.0
"""A client believes no longer wait."""

DETAILS_KEY = "grpc-status-details-bin"
"""Where gRPC's own clients look for a google.rpc.Status with RetryInfo."""

MAX_DETAILS_BYTES = 4000
"""Longest text of an error, in bytes of a header. Both sides refuse headers of about 8 KB."""

_BROKEN_WRITE = "Internal error from Core"
"""gRPC's own text if a stream ends during a write."""

_REMOVED = "Stream removed ("
"""gRPC's own text before the cause if a connection ends, or the peer resets a stream."""

_NOT_DECODED = "Exception deserializing response!"
"""gRPC's own text for bytes that are not a message."""

_TOO_LONG = ("message larger than max", "metadata size exceeds")
"""gRPC's own texts of RESOURCE_EXHAUSTED if the peer sent more than this side accepts."""

_BY_NAME: Mapping[str, type[PacelineError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, PacelineError)
}
_BY_CODE: Mapping[grpc.StatusCode, type[PacelineError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.CANCELLED: UnavailableError,
}


def status_of(error: PacelineError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Status code, details and trailing metadata of `error`. Long details are cut in the middle."""
    metadata = [(ERROR_KEY, type(error).__name__)]
    if isinstance(error, InvalidRequestError):
        metadata.append((FIELD_KEY, error.field))
    if isinstance(error, OverloadedError) and error.retry_seconds is not None:
        metadata.append((RETRY_KEY, f"{error.retry_seconds:.3f}"))
    code = grpc.StatusCode[outward(error).grpc_code]
    return code, _shortened(str(error)), tuple(metadata)


def call_status_of(
    error: PacelineError,
) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]:
    """`status_of` for the end of a call, with google.rpc.RetryInfo if the wait is known.

    Only servers call this: it needs googleapis-common-protos, which a client does without.
    """
    code, details, metadata = status_of(error)
    if not isinstance(error, OverloadedError) or error.retry_seconds is None:
        return code, details, metadata
    from google.rpc import error_details_pb2, status_pb2

    info = error_details_pb2.RetryInfo()
    info.retry_delay.FromMilliseconds(round(1000 * error.retry_seconds))
    rich = status_pb2.Status(code=code.value[0], message=details)
    rich.details.add().Pack(info)
    return code, details, (*metadata, (DETAILS_KEY, rich.SerializeToString()))


def _shortened(details: str) -> str:
    """The text, or its start and its end if it is too long for a header."""
    kept, shown = len(details), details
    while kept > MAX_DETAILS_BYTES or len(quote(shown)) > MAX_DETAILS_BYTES:
        kept = min(kept // 2, MAX_DETAILS_BYTES)
        left_out = f" ... ({len(details) - kept:,} characters) ... "
        shown = details[: kept - kept // 2] + left_out + details[len(details) - kept // 2 :]
    return shown


def error_of(error: grpc.RpcError, address: str) -> PacelineError:
    """The Paceline error of a failed call to `address`."""
    call: Any = error
    metadata = _as_dict(call.trailing_metadata())
    return error_told(call.code(), call.details() or "", metadata, address)


def error_told(
    code: grpc.StatusCode, details: str, metadata: Mapping[str, str], address: str
) -> PacelineError:
    """The Paceline error of a status, whether `status_of` or gRPC itself made it.

    If this version does not know the class, as of a newer server, the status code decides.
    """
    details = details or code.name
    if ERROR_KEY not in metadata and FIELD_KEY not in metadata:
        return _of_grpc(code, details, address)
    kind = _BY_NAME.get(metadata.get(ERROR_KEY, "")) or _BY_CODE.get(code, InternalError)
    if issubclass(kind, InvalidRequestError):
        field = metadata.get(FIELD_KEY) or WHOLE_REQUEST
        return kind(field, details.removeprefix(f"{field}: "))
    if issubclass(kind, OverloadedError):
        return kind(details, _seconds(metadata.get(RETRY_KEY)))
    return kind(details)


def _seconds(text: str | None) -> float | None:
    """The wait that a server asks for; None if it asks for none that makes sense."""
    try:
        seconds = float(text) if text is not None else -1.0
    except ValueError:
        return None
    return seconds if 0 <= seconds <= MAX_RETRY_SECONDS else None


def _of_grpc(code: grpc.StatusCode, details: str, address: str) -> PacelineError:
    """The Paceline error of a status that gRPC itself or a foreign server made."""
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return WrongServerError(
            f"the server at {address} is not an inference server of Paceline ({details}): give the "
            "address that `paceline up` printed, not that of a worker or of Ray"
        )
    if code is grpc.StatusCode.INTERNAL and details == _BROKEN_WRITE:
        return UnavailableError(f"the stream to the server at {address} broke; try again")
    if code is grpc.StatusCode.INTERNAL and details == _NOT_DECODED:
        return unreadable(address)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and any(said in details for said in _TOO_LONG):
        return ProtocolError(f"the server at {address} sent more than a client accepts: {details}")
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidRequestError(WHOLE_REQUEST, details)
    was_reset = code is grpc.StatusCode.INTERNAL and details.startswith(_REMOVED)
    if was_reset or code is grpc.StatusCode.UNAVAILABLE:
        cause = details.rpartition("last error: ")[2]
        if cause.startswith(_REMOVED):
            cause = cause[len(_REMOVED) : -1]
        return UnavailableError(
            f"the connection to the server at {address} broke: {cause}; "
            "check whether the server is still up, then try again"
        )
    return _BY_CODE.get(code, InternalError)(
        f"the server at {address} answered {code.name}: {details}"
    )


def unreadable(address: str) -> ProtocolError:
    """The error of an answer that gRPC could not decode, for which it may return None."""
    return ProtocolError(f"the server at {address} sent bytes that are not a known message")


def _as_dict(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    pairs = metadata or ()
    return {
        key: value if isinstance(value, str) else value.decode(errors="replace")
        for key, value in pairs
    }

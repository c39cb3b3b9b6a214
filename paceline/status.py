"""Between the error tree and gRPC statuses: what a server tells, and what a client makes of it.

The status code is that of `paceline.errors.outward`. Trailing metadata names the class of the error
and, for a wrong request, the field, so that a client raises what the server raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

import grpc

from paceline import errors
from paceline.errors import (
    DeadlineError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    PacelineError,
    ProtocolError,
    UnavailableError,
    outward,
)

WHOLE_REQUEST = "request"
"""In place of a field's name where none is told."""

FIELD_KEY = "paceline-field"
ERROR_KEY = "paceline-error"
MAX_DETAILS_BYTES = 4000
"""Of an error's text as gRPC encodes it for a header; both sides refuse headers of some 8 KB."""

_BROKEN_WRITE = "Internal error from Core"
"""What gRPC says on its own where a stream ends while a message is written to it."""

_REMOVED = "Stream removed ("
"""What gRPC puts before the cause where a connection ends."""

_NOT_DECODED = "Exception deserializing response!"
"""What gRPC says on its own of bytes that are no message."""

_TOO_LONG = ("message larger than max", "metadata size exceeds")
"""What gRPC's own RESOURCE_EXHAUSTED says where a peer sent more than this side takes."""

_BY_NAME: Mapping[str, type[PacelineError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, PacelineError)
}
_BY_CODE: Mapping[grpc.StatusCode, type[PacelineError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.CANCELLED: UnavailableError,
}


def status_of(error: PacelineError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Code, details and trailing metadata by which a server tells `error`.

    Details that quote something long are cut in the middle.
    """
    metadata = [(ERROR_KEY, type(error).__name__)]
    if isinstance(error, InvalidRequestError):
        metadata.append((FIELD_KEY, error.field))
    code = grpc.StatusCode[outward(error).grpc_code]
    return code, _shortened(str(error)), tuple(metadata)


def _shortened(details: str) -> str:
    """Its begin and its end, where the whole is too long for a header."""
    kept, shown = len(details), details
    while kept > MAX_DETAILS_BYTES or len(quote(shown)) > MAX_DETAILS_BYTES:
        kept = min(kept // 2, MAX_DETAILS_BYTES)
        left_out = f" ... ({len(details) - kept:,} characters) ... "
        shown = details[: kept - kept // 2] + left_out + details[len(details) - kept // 2 :]
    return shown


def error_of(error: grpc.RpcError, address: str) -> PacelineError:
    """The error of ours that a failed call to `address` means."""
    call: Any = error
    metadata = _as_dict(call.trailing_metadata())
    return error_told(call.code(), call.details() or "", metadata, address)


def error_told(
    code: grpc.StatusCode, details: str, metadata: Mapping[str, str], address: str
) -> PacelineError:
    """The error of ours that `status_of` told so, or that gRPC itself means by it.

    A class that this version does not know, as of a newer server, is that of the status code.
    """
    details = details or code.name
    if ERROR_KEY not in metadata and FIELD_KEY not in metadata:
        return _of_grpc(code, details, address)
    kind = _BY_NAME.get(metadata.get(ERROR_KEY, "")) or _BY_CODE.get(code, InternalError)
    if issubclass(kind, InvalidRequestError):
        field = metadata.get(FIELD_KEY) or WHOLE_REQUEST
        return kind(field, details.removeprefix(f"{field}: "))
    return kind(details)


def _of_grpc(code: grpc.StatusCode, details: str, address: str) -> PacelineError:
    """What a status means that no server of ours made, but gRPC or another server."""
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return UnavailableError(
            f"what answers at {address} is no inference server of Paceline ({details}): give the "
            "address that `paceline up` printed, not that of a worker or of Ray"
        )
    if code is grpc.StatusCode.INTERNAL and details == _BROKEN_WRITE:
        return UnavailableError(f"the stream to the server at {address} broke; try again")
    if code is grpc.StatusCode.INTERNAL and details == _NOT_DECODED:
        return unreadable(address)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and any(said in details for said in _TOO_LONG):
        return ProtocolError(f"the server at {address} sent more than a client takes: {details}")
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidRequestError(WHOLE_REQUEST, details)
    if code is grpc.StatusCode.UNAVAILABLE:
        cause = details.rpartition("last error: ")[2]
        if cause.startswith(_REMOVED):
            cause = cause[len(_REMOVED) : -1]
        return UnavailableError(
            f"the connection to the server at {address} broke: {cause}; "
            "see whether the server is still up, then try again"
        )
    return _BY_CODE.get(code, InternalError)(
        f"the server at {address} answered {code.name}: {details}"
    )


def unreadable(address: str) -> ProtocolError:
    """The error of an answer that could not be decoded, in place of which gRPC may give None."""
    return ProtocolError(f"the server at {address} sent bytes that are no message of this version")


def _as_dict(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    pairs = metadata or ()
    return {
        key: value if isinstance(value, str) else value.decode(errors="replace")
        for key, value in pairs
    }

"""The address of a server: what a caller may give, and why nobody answers there."""

from __future__ import annotations

import ipaddress
import re
import socket
from contextlib import suppress
from dataclasses import dataclass

from paceline.errors import InvalidRequestError

HIGHEST_PORT = 65535
_EXAMPLE = "expected HOST:PORT such as 127.0.0.1:8001"
_HOST = re.compile(r"[^\s:/?#@\[\]]+")

CHECK_SECONDS = 1.0
"""Most seconds of each exchange of `obstacle_at`, which makes two at most."""

_HTTP2_BEGIN = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What a gRPC client sends first: the preface of HTTP/2 and an empty SETTINGS frame."""

_SETTINGS_FRAME = 4
_TLS_ALERT = b"\x15\x03"
_SHOWN_BYTES = 24
"""Of an answer that is not gRPC's, in the error."""


@dataclass(frozen=True, slots=True)
class Address:
    """A host, without the brackets of an IPv6 address, and a port."""

    host: str
    port: int


def parse_address(text: str, field: str = "address") -> Address:
    """Read HOST:PORT or [IPV6]:PORT. Raises InvalidRequestError that says what to give instead."""
    if not isinstance(text, str):
        raise InvalidRequestError(field, f"{_EXAMPLE}, got {text!r}")
    if "://" in text:
        rest = re.split("[/?#]", text.partition("://")[2].lstrip("/"))[0].rpartition("@")[2]
        hint = f"give {rest!r} alone" if _is_address(rest) else "give the host and the port alone"
        raise InvalidRequestError(field, f"{_EXAMPLE}, got the URL {text!r}; {hint}")
    with suppress(ValueError):
        ipaddress.IPv6Address(text)
        raise InvalidRequestError(
            field, f"{_EXAMPLE}, got {text!r}; an IPv6 host stands in brackets: [::1]:8001"
        )
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        raise InvalidRequestError(field, f"{_EXAMPLE}, got {text!r}, which names no port")
    if not (port.isascii() and port.isdecimal() and 1 <= int(port[:6]) <= HIGHEST_PORT):
        raise InvalidRequestError(
            field, f"{_EXAMPLE}, got {text!r}; a port is a number from 1 to {HIGHEST_PORT}"
        )
    if host.startswith("[") and host.endswith("]"):
        with suppress(ValueError):
            ipaddress.IPv6Address(host[1:-1])
            return Address(host[1:-1], int(port))
    elif _HOST.fullmatch(host):
        return Address(host, int(port))
    raise InvalidRequestError(
        field, f"{_EXAMPLE} or [::1]:8001, got {text!r}; {host!r} is not the name of a host"
    )


def _is_address(text: str) -> bool:
    try:
        parse_address(text)
    except InvalidRequestError:
        return False
    return True


def obstacle_at(address: Address, seconds: float) -> str | None:
    """Why gRPC cannot connect to `address`. None: it may yet succeed, so go on trying.

    gRPC tells its callers no cause that they could rely on, so this looks for itself: it looks the
    name up, connects, and reads how what listens there answers the begin of HTTP/2. Takes about
    `seconds` at most, the look-up not counted.
    """
    seconds = min(seconds / 2, CHECK_SECONDS)
    try:
        answer = _answer_at(address, seconds)
    except socket.gaierror as error:
        return f"the host name {address.host!r} cannot be looked up: {error.strerror}"
    except UnicodeError:
        return f"{address.host!r} is not the name of a host"
    except TimeoutError:
        return None
    except ConnectionRefusedError:
        return "nothing listens there (connection refused); is the server up?"
    except OSError as error:
        return f"the connection failed: {error.strerror or error}"
    if len(answer) > _SETTINGS_FRAME and answer[3] == _SETTINGS_FRAME:
        return None
    if answer.startswith(_TLS_ALERT) or _speaks_tls(address, seconds):
        return "TLS is spoken there, which this client does not; give the address of a plain port"
    if answer.startswith(b"HTTP/"):
        return "a server of HTTP/1 listens there; give the port of gRPC"
    told = f"it answered {answer[:_SHOWN_BYTES]!r}" if answer else "it ended the connection"
    return f"what listens there does not speak gRPC: {told}"


def _answer_at(address: Address, seconds: float) -> bytes:
    """What comes first; empty where the connection is ended instead."""
    with (
        socket.create_connection((address.host, address.port), seconds) as connection,
        suppress(ConnectionError),
    ):
        connection.sendall(_HTTP2_BEGIN)
        return connection.recv(512)
    return b""


def _speaks_tls(address: Address, seconds: float) -> bool:
    import ssl  # For this rare case alone: it takes as long to import as all the rest.

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with (
            socket.create_connection((address.host, address.port), seconds) as connection,
            context.wrap_socket(connection),
        ):
            return True
    except OSError as error:
        # An alert, such as for a certificate that it wants to see, is TLS as well.
        return isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or "")

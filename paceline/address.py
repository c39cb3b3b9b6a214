"""The address of a server: what a caller may write, and why a connection to it fails."""

from __future__ import annotations

import ipaddress
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import InvalidRequestError

if TYPE_CHECKING:
    import ssl

HIGHEST_PORT = 65535
EVERYWHERE = ("0.0.0.0", "[::]")
"""Hosts of a server that listens on all interfaces. A caller needs another name of it."""

_EXAMPLE = "expected HOST:PORT such as 127.0.0.1:8001"
_HOST = re.compile(r"[^\s:/?#@\[\]]+")

CHECK_SECONDS = 1.0
"""Upper bound on each exchange of `obstacle_at`, which makes at most two."""

_HTTP2_BEGIN = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What a gRPC client sends first: the HTTP/2 preface and an empty SETTINGS frame."""

_SETTINGS_FRAME = 4
_TLS_ALERT = b"\x15\x03"
_SHOWN_BYTES = 24
"""Bytes of a foreign answer that the error quotes."""


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port. An IPv6 host has no brackets here."""

    host: str
    port: int


def parse_address(text: str, field: str = "address") -> Address:
    """Read HOST:PORT or [IPV6]:PORT. Raises InvalidRequestError, which says what to write."""
    if not isinstance(text, str):
        raise InvalidRequestError(field, f"{_EXAMPLE}, got {text!r}")
    if "://" in text:
        rest = re.split("[/?#]", text.partition("://")[2].lstrip("/"))[0].rpartition("@")[2]
        hint = f"give {rest!r} alone" if _is_address(rest) else "give the host and the port alone"
        raise InvalidRequestError(field, f"{_EXAMPLE}, got the URL {text!r}; {hint}")
    with suppress(ValueError):
        ipaddress.IPv6Address(text)
        raise InvalidRequestError(
            field, f"{_EXAMPLE}, got {text!r}; write an IPv6 host in brackets: [::1]:8001"
        )
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        raise InvalidRequestError(field, f"{_EXAMPLE}, got {text!r}, which has no port")
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
        field, f"{_EXAMPLE} or [::1]:8001, got {text!r}; {host!r} is not a host name"
    )


def _is_address(text: str) -> bool:
    try:
        parse_address(text)
    except InvalidRequestError:
        return False
    return True


def obstacle_at(
    address: Address, seconds: float, context: ssl.SSLContext | None = None
) -> str | None:
    """Why gRPC cannot connect to `address`; None if it may still succeed.

    `context`: what a client with TLS checks; None: it speaks plain text.

    gRPC does not report a reliable cause. This function looks the name up, connects, sends the
    start of HTTP/2 and reads the answer. It takes at most about `seconds`, and the time of the
    look-up.
    """
    seconds = min(seconds / 2, CHECK_SECONDS)
    try:
        if context is not None:
            return _tls_obstacle_at(address, seconds, context)
        answer = _answer_at(address, seconds)
    except socket.gaierror as error:
        return f"the host name {address.host!r} cannot be looked up: {error.strerror}"
    except UnicodeError:
        return f"{address.host!r} is not a host name"
    except TimeoutError:
        return None
    except ConnectionRefusedError:
        return "nothing listens there (connection refused); is the server up?"
    except OSError as error:
        return f"the connection failed: {error.strerror or error}"
    if len(answer) > _SETTINGS_FRAME and answer[3] == _SETTINGS_FRAME:
        return None
    if answer.startswith(_TLS_ALERT) or _speaks_tls(address, seconds):
        return (
            "the server there speaks TLS, and this client plain text; give it the certificate of "
            "the server's authority (ca=FILE, or --ca FILE for a command)"
        )
    if answer.startswith(b"HTTP/"):
        return "an HTTP/1 server listens there; give the gRPC port"
    did = f"answered {answer[:_SHOWN_BYTES]!r}" if answer else "closed the connection"
    return f"the server there does not speak gRPC: it {did}"


def _answer_at(address: Address, seconds: float) -> bytes:
    """The first bytes of the answer; empty if the other side closes the connection."""
    with (
        socket.create_connection((address.host, address.port), seconds) as connection,
        suppress(ConnectionError),
    ):
        connection.sendall(_HTTP2_BEGIN)
        return connection.recv(512)
    return b""


def _tls_obstacle_at(address: Address, seconds: float, context: ssl.SSLContext) -> str | None:
    """As `obstacle_at`. Raises OSError as that function handles it."""
    import ssl

    try:
        with (
            socket.create_connection((address.host, address.port), seconds) as connection,
            context.wrap_socket(connection, server_hostname=address.host) as secured,
        ):
            if secured.selected_alpn_protocol() == "h2":
                return None
            return "the server there speaks TLS, but no HTTP/2; give the gRPC port"
    except ssl.SSLCertVerificationError as error:
        return (
            f"its certificate is not accepted: {error.verify_message.rstrip('.')}; check the "
            "address, `ca`, and the clocks"
        )
    except ssl.SSLEOFError:
        return "the server there ended the TLS handshake; it may speak plain text: leave out TLS"
    except ssl.SSLError as error:
        said = (error.reason or str(error)).replace("_", " ").lower()
        if _answer_at(address, seconds)[3:4] == bytes([_SETTINGS_FRAME]):
            return "the server there speaks plain text; leave out `ca` and `tls` (--ca)"
        return f"the TLS handshake failed: {said}"


def _speaks_tls(address: Address, seconds: float) -> bool:
    import ssl  # Rarely needed, and slow to import.

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
        # A TLS alert, for example because the server asks for a certificate, shows TLS too.
        return isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or "")

"""gRPC options of every client and server of ours, in one place (figures: DESIGN.md section 7).

Between driver and workers both sides ping each second, so that a peer which is gone is noticed
within about 2.5 s even when no call is running. A server with gRPC's defaults would end such a
connection after five seconds (`too_many_pings`), therefore ours allow it. Callers are pinged seldom
and waited for longer: a busy or suspended host of theirs is no reason to give their requests up.

gRPC would send every connection through the HTTP proxy that `http_proxy`, `https_proxy` or
`grpc_proxy` name. Between our own processes no connection takes one. A caller's does, as a
company's network may ask for it, but never to its own host.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Largest message that either side takes or sends."""

PART_BYTES = 4 * 1024 * 1024
"""Of a message to a worker that could have more: its lists go on in another one. What cannot be
divided, such as one sequence's opening, has at most 12 MiB (paceline/rules.py)."""

MAX_REQUEST_BYTES = MAX_MESSAGE_BYTES - 1024
"""Largest request or answer: on a stream that it shares, its number goes with it. A message beyond
what a side takes ends the whole stream; the limits of a request (paceline/rules.py) keep below."""

MAX_METADATA_BYTES = 8 * 1024
"""Largest metadata of a call, either way; gRPC's default. Ours has some 100 bytes, and the text of
an error (`paceline.status`)."""

MAX_STREAMS_PER_CONNECTION = 1024
"""Calls that a connection may have open on a server; further ones wait at the client. A client of
ours has one for all of its requests."""

MAX_CONNECTIONS = 1024
"""Connections that a server takes at once; further ones are closed."""

MAX_CALLS_PER_SERVER = 4096
"""Calls that all connections of a server may have open; further ones get RESOURCE_EXHAUSTED. One
whose caller reads nothing costs some 60 KB."""


@dataclass(frozen=True, slots=True)
class Keepalive:
    """Milliseconds between two pings, and to wait for the answer to one."""

    interval_ms: int
    timeout_ms: int


WORKERS = Keepalive(1_000, 2_000)
"""Between driver and workers. A timeout of one second is too short: on two busy cores (load 10) a
worker in good health was once taken for gone."""

CALLERS = Keepalive(10_000, 20_000)
"""Between a caller and the server that it asks."""

CONNECT_ATTEMPT_MS = 2000
"""Time that one attempt to connect may take."""

Options = list[tuple[str, int]]


def client_options(keepalive: Keepalive = WORKERS, *, may_use_proxy: bool = False) -> Options:
    """Options of a channel.

    `may_use_proxy`: whether it goes through the HTTP proxy that the environment names, if any.
    """
    return [
        *_common_options(keepalive),
        ("grpc.enable_http_proxy", int(may_use_proxy)),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Bounds an attempt; the wait after one that failed is between the two others.
        ("grpc.min_reconnect_backoff_ms", CONNECT_ATTEMPT_MS),
        ("grpc.max_reconnect_backoff_ms", 500),
    ]


def caller_options(address: str) -> Options:
    """Options of a caller's channel to the server at "host:port"."""
    return client_options(CALLERS, may_use_proxy=not _is_own_host(address))


def server_options(keepalive: Keepalive = WORKERS) -> Options:
    """Options of a server. A port that another process listens on is refused, not shared."""
    return [
        *_common_options(keepalive),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ]


def _common_options(keepalive: Keepalive) -> Options:
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", 2 * MAX_METADATA_BYTES),
        ("grpc.keepalive_time_ms", keepalive.interval_ms),
        ("grpc.keepalive_timeout_ms", keepalive.timeout_ms),
        # Without it an unanswered ping is waited for a minute, whatever the keepalive's timeout is.
        ("grpc.http2.ping_timeout_ms", keepalive.timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def _is_own_host(address: str) -> bool:
    """Whether "host:port" is on the loopback interface, told without a look-up."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")

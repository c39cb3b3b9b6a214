"""gRPC options of every Paceline client and server, and the metadata that tells a caller's trace.

Driver and workers ping each other every second, so that each notices within about 2.5 s that its
peer is gone, even if no call is running. With gRPC's defaults a server would end such a connection
after five seconds (`too_many_pings`). A caller is pinged every 10 s and has 20 s to answer, because
its host may be busy or suspended for a while.

By default gRPC connects through the HTTP proxy that `http_proxy`, `https_proxy` or `grpc_proxy`
names. Connections between Paceline's own processes never use a proxy. A caller's connection does,
because a company's network may require it, unless the server is on the caller's own host.
"""

from __future__ import annotations

import ipaddress
import sys
from dataclasses import dataclass
from typing import Any

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Largest message that either side accepts or sends."""

PART_BYTES = 4 * 1024 * 1024
"""Size at which a message to a worker is divided: its lists go on in the next message. What cannot
be divided, such as the opening of a sequence, has at most 12 MiB (paceline/limits.py)."""

MAX_REQUEST_BYTES = MAX_MESSAGE_BYTES - 1024
"""Largest request or answer. The rest of MAX_MESSAGE_BYTES is for its number on a shared stream. A
message that is too large ends the whole stream; the limits of a request (paceline/limits.py) keep
it below this size."""

MAX_METADATA_BYTES = 8 * 1024
"""Largest metadata of a call in each direction; gRPC's default. Paceline sends about 100 bytes and
the text of an error (paceline/status.py)."""

MAX_STREAMS_PER_CONNECTION = 1024
"""Open calls per connection; further ones wait at the client. An `AsyncClient` has one call for all
of its requests."""

MAX_CONNECTIONS = 1024
"""Open connections per server; the server closes further ones."""

MAX_CALLS_PER_SERVER = 4096
"""Open calls per server; further ones end with RESOURCE_EXHAUSTED. A call whose caller does not
read takes about 60 KB."""


@dataclass(frozen=True, slots=True)
class Keepalive:
    """Time between two pings, and how long to wait for the answer to one, in milliseconds."""

    interval_ms: int
    timeout_ms: int


WORKERS = Keepalive(1_000, 2_000)
"""Between driver and workers. One second is too short a timeout: on two busy cores (load 10) a
healthy worker has missed it."""

CALLERS = Keepalive(10_000, 20_000)
"""Between a caller and its server."""

CONNECT_ATTEMPT_MS = 2000
"""Longest time of one attempt to connect."""

TRACEPARENT = "traceparent"
"""Name of the metadata of a call, and of the HTTP header."""

Options = list[tuple[str, int]]


def client_options(keepalive: Keepalive = WORKERS, *, may_use_proxy: bool = False) -> Options:
    """Options of a channel. `may_use_proxy`: whether it may use the environment's HTTP proxy."""
    return [
        *_common_options(keepalive),
        ("grpc.enable_http_proxy", int(may_use_proxy)),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # The longest attempt. The other two bound the wait after a failed one.
        ("grpc.min_reconnect_backoff_ms", CONNECT_ATTEMPT_MS),
        ("grpc.max_reconnect_backoff_ms", 500),
    ]


def caller_options(address: str) -> Options:
    """Options of a caller's channel to the server at "host:port"."""
    return client_options(CALLERS, may_use_proxy=not _is_own_host(address))


def server_options(keepalive: Keepalive = WORKERS) -> Options:
    """Options of a server. It does not share a port with another process."""
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
        # Without this option gRPC waits a minute for the answer, whatever the keepalive's timeout.
        ("grpc.http2.ping_timeout_ms", keepalive.timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def _is_own_host(address: str) -> bool:
    """Whether "host:port" is on the loopback interface, decided without a look-up."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def traceparent() -> str:
    """The current span of this task or thread, as W3C has it; "": there is none.

    There may be one if the program uses OpenTelemetry, which this package does not import.
    """
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return ""
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def trace_metadata() -> tuple[tuple[str, str], ...]:
    told = traceparent()
    return ((TRACEPARENT, told),) if told else ()

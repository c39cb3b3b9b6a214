"""What a pod of the chart does before it ends: `python -m deploy.jobs.leave --seconds 60`.

Kubernetes takes a pod that ends out of its Services, so new callers go elsewhere. This waits until
the requests at the pod's HTTP port have their answers, and then ends Ray here. It does not wait for
callers that only keep a connection open for further requests.

Serve's proxy tells nobody what it has to do at the moment, but the kernel knows when each
connection last received and sent something.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from typing import Annotated

import typer

from deploy.terminal.usage import run_app

HTTP_PORT = 8000
"""That of Serve's proxy in the chart."""
SETTLE_SECONDS = 5.0
"""How long it may take until all proxies of the cluster know that this pod ends."""
QUIET_SECONDS = 15.0
"""A connection that sent an answer, or a part of one, and nothing more for this time is idle."""
_LOOK_SECONDS = 0.5

# linux/netlink.h, linux/sock_diag.h and linux/inet_diag.h
_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, _ERROR, _DONE = 4, 20, 0x301, 2, 3
_ESTABLISHED, _TCP_INFO = 1, 2
_MESSAGE = struct.Struct("=IHHII")
_SOCKET_SIZE = 72
_MS_SENT, _MS_RECEIVED, _SEGMENTS_IN = 44, 52, 152
"""Where tcp_info of linux/tcp.h has tcpi_last_data_sent, tcpi_last_data_recv, tcpi_data_segs_in."""


def leave(
    seconds: Annotated[
        float, typer.Option(min=0, help="upper bound on the wait for open requests")
    ] = 60.0,
    grace: Annotated[int, typer.Option(min=1, help="seconds that Ray's processes have")] = 30,
) -> None:
    """Wait for the requests at this pod's HTTP port, then end Ray on this pod."""
    until = time.monotonic() + seconds
    time.sleep(min(SETTLE_SECONDS, seconds))
    while (requests := _open_requests()) != "0" and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
    sys.stdout.write(f"ending Ray: {requests} requests at port {HTTP_PORT} are open\n")
    sys.stdout.flush()
    os.execvp("ray", ("ray", "stop", "--grace-period", str(grace)))


def _open_requests() -> str:
    try:
        return str(num_requests(HTTP_PORT))
    except OSError as error:  # Some sandboxes: then requests have all the time that there is.
        return f"unknown ({error})"


def num_requests(port: int, *, quiet_seconds: float = QUIET_SECONDS) -> int:
    """The number of connections to `port` of this host, or pod, that have no complete answer yet.

    A connection counts if it received something and then sent nothing, or sent something in the
    last `quiet_seconds`, as a stream does. Raises OSError if the kernel does not tell.
    """
    count = 0
    for family in (socket.AF_INET, socket.AF_INET6):
        for info in _connections(family, port):
            (segments_in,) = struct.unpack_from("=I", info, _SEGMENTS_IN)
            (sent,) = struct.unpack_from("=I", info, _MS_SENT)
            (received,) = struct.unpack_from("=I", info, _MS_RECEIVED)
            is_idle = sent < received and sent > 1000 * quiet_seconds
            count += segments_in > 0 and not is_idle
    return count


def _connections(family: int, port: int) -> Iterator[bytes]:
    """tcp_info of each established connection to a local port, in which times are milliseconds."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        asked = struct.pack(
            "=BBBxI48x", family, socket.IPPROTO_TCP, 1 << (_TCP_INFO - 1), 1 << _ESTABLISHED
        )
        size = _MESSAGE.size + len(asked)
        kernel.send(_MESSAGE.pack(size, _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0) + asked)
        while True:
            told = kernel.recv(1 << 18)
            while told:
                size, kind, *_ = _MESSAGE.unpack_from(told)
                body, told = told[_MESSAGE.size : size], told[(size + 3) & ~3 :]
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    (code,) = struct.unpack_from("=i", body)
                    raise OSError(-code, os.strerror(-code))
                if struct.unpack_from(">H", body, 4) == (port,):
                    yield from _attributes(body[_SOCKET_SIZE:], _TCP_INFO)


def _attributes(told: bytes, kind: int) -> Iterator[bytes]:
    while told:
        size, found = struct.unpack_from("=HH", told)
        if found == kind:
            yield told[4:size]
        told = told[(size + 3) & ~3 :]


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(leave)
    sys.exit(run_app(lambda: app, "deploy.jobs.leave"))

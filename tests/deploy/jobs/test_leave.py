"""What a pod that ends waits for: requests without an answer, not connections without a request."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from deploy.jobs.leave import num_requests

_TICK = 0.05
"""Seconds in which the kernel's clock of a connection moves on."""
FAMILIES = {"IPv4": (socket.AF_INET, "127.0.0.1"), "IPv6": (socket.AF_INET6, "::1")}


@pytest.fixture(params=FAMILIES)
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket, int]]:
    """A caller's end of a connection, the server's end, and the server's port."""
    family, host = FAMILIES[request.param]
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server((host, 0), family=family))
        port = server.getsockname()[1]
        caller = stack.enter_context(socket.create_connection((host, port)))
        yield caller, stack.enter_context(server.accept()[0]), port


def test_a_caller_that_asks_nothing_is_not_waited_for(
    ends: tuple[socket.socket, socket.socket, int],
) -> None:
    """Neither before its first request nor after an answer, until it asks again."""
    caller, server, port = ends
    assert num_requests(port) == 0
    for _ in range(2):
        caller.sendall(b"a question")
        assert server.recv(100)
        time.sleep(_TICK)
        assert num_requests(port, quiet_seconds=0.0) == 1
        server.sendall(b"an answer")
        assert num_requests(port) == 1, "there may be more of it"
        time.sleep(_TICK)
        assert num_requests(port, quiet_seconds=0.0) == 0

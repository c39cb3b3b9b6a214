"""Ports at which servers of a test come and go, without anybody else's taking one meanwhile."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port() -> Iterator[int]:
    """A port that is ours as long as the block: a server that names it may listen on it.

    It is bound and nobody listens, so the system gives it to none who asks for any port, and lets
    those who allow its reuse have it, as gRPC's servers do.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield int(holder.getsockname()[1])

"""Ports at which servers of a test come and go, and which no other process takes meanwhile."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port() -> Iterator[int]:
    """Hold a port during the block. A server that names it may listen on it.

    The port is bound without a listener. So the system does not give it to processes that ask
    for any port, but to those that allow its reuse, as gRPC's servers do.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield int(holder.getsockname()[1])

"""Which of gRPC's threads reads a socket: the one that hands the message over, no other before it.

Measured between two processes that sleep most of the time, as a driver and a shard do: there and
back 0.50 ms rather than 0.60 (docs/performance.md).
"""

from __future__ import annotations

import os

_VARIABLE = "GRPC_EXPERIMENTS"


def read_in_place() -> None:
    """Have the thread that waits for gRPC's events read sockets itself, in this process.

    gRPC looks when it is first imported; later this changes nothing. What an operator has put into
    GRPC_EXPERIMENTS stays as it is.
    """
    os.environ.setdefault(_VARIABLE, "-event_engine_client,-event_engine_listener")

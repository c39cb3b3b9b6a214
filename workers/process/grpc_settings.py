"""Settings of gRPC's core for all our processes; a caller's own process is not changed.

The thread that hands a message over also reads its socket, without another thread before it.
Between two processes that sleep most of the time, such as a driver and a shard, a round trip takes
0.50 ms instead of 0.60 ms (docs/performance/lookahead.md). gRPC writes only errors to stderr: the
user of a connection reports its end.
"""

from __future__ import annotations

import os

_SETTINGS = {
    "GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener",
    "GRPC_VERBOSITY": "ERROR",
}


def apply_grpc_settings() -> None:
    """Set gRPC's variables for this process, unless an operator has set them.

    gRPC reads them when it is first imported; later calls have no effect.
    """
    for variable, value in _SETTINGS.items():
        os.environ.setdefault(variable, value)

"""What we ask of gRPC's core, in every process of ours that is not a caller's own.

A socket is read by the thread that hands the message over, no other before it: between two
processes that sleep most of the time, as a driver and a shard do, there and back takes 0.50 ms
rather than 0.60 (docs/performance/lookahead.md). And stderr gets errors alone: a connection that
ends is told by its user.
"""

from __future__ import annotations

import os

_SETTINGS = {
    "GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener",
    "GRPC_VERBOSITY": "ERROR",
}


def apply_grpc_settings() -> None:
    """Set gRPC's variables for this process; what an operator has set stays as it is.

    gRPC looks when it is first imported; later this changes nothing.
    """
    for variable, value in _SETTINGS.items():
        os.environ.setdefault(variable, value)

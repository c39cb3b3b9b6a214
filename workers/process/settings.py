"""Settings of gRPC's core and of Python's garbage collector, for all our processes.

A caller's own process is not changed.
"""

from __future__ import annotations

import gc
import os

_GRPC_SETTINGS = {
    "GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener",
    "GRPC_VERBOSITY": "ERROR",
}
"""GRPC_EXPERIMENTS: the thread that delivers a message also reads its socket, so no other thread
hands the message over. Between two processes that sleep most of the time, such as a driver and a
shard, a round trip takes 0.50 ms instead of 0.60 ms.
GRPC_VERBOSITY: our own code reports the end of a connection, so gRPC writes only errors to stderr.
"""


def apply_grpc_settings() -> None:
    """Set gRPC's variables for this process, unless an operator has set them.

    gRPC reads them when it is first imported; later calls have no effect.
    """
    for variable, value in _GRPC_SETTINGS.items():
        os.environ.setdefault(variable, value)


YOUNG_OBJECTS = 20_000
"""The number of new objects after which the garbage collector runs. A step of 1,000 sequences makes
some thousands, and frees them all without the collector. With Python's default of 700 the collector
ran 33 times per step and took a quarter of the driver's time.
"""


def freeze_present_objects() -> None:
    """Collect garbage once, and exclude all present objects from later collections.

    A full collection visits every object in the middle of a step: 0.4 s for the 380,000 objects of
    a driver's imports.
    """
    gc.collect()
    gc.freeze()
    _, *older = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, *older)

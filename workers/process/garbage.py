"""Python's garbage collector in a process that serves."""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 20_000
"""The number of new objects after which the collector runs. A step of 1,000 sequences holds some
thousands at a time, and frees them all by itself. With Python's default of 700 the collector ran 33
times per step, a quarter of the driver's time (docs/performance/serving.md).
"""


def spare_what_is_there() -> None:
    """Collect once, and exclude all present objects from later collections.

    A full collection visits every object in the middle of a step: 0.4 s for the 380,000 objects of
    a driver's imports (docs/performance/lookahead.md).
    """
    gc.collect()
    gc.freeze()
    _, *older = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, *older)

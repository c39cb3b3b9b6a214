"""Python's garbage collector in a process that serves."""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 20_000
"""Objects that are made and not yet freed before the collector looks at them. A step of 1,000
sequences holds some thousands at a time, and frees them all by itself; Python's own 700 had it look
33 times a step, a quarter of the driver's time (docs/performance/serving.md)."""


def spare_what_is_there() -> None:
    """Collect once; leave out of all later collections what is there now, which stays.

    A full collection walks every object, in the midst of a step: 0.4 s of the 380,000 of a driver's
    imports (docs/performance/lookahead.md).
    """
    gc.collect()
    gc.freeze()
    _, *older = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, *older)

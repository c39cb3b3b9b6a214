"""Python's garbage collector in a process that serves."""

from __future__ import annotations

import gc


def spare_what_is_there() -> None:
    """Collect once; leave out of all later collections what is there now, which stays.

    A full collection walks every object, in the midst of a step: 0.4 s of the 380,000 of a driver's
    imports (docs/performance/lookahead.md).
    """
    gc.collect()
    gc.freeze()

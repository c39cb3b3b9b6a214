"""How much work is done, by counts that no other process on the host disturbs."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType


def calls_of(act: Callable[[], object]) -> int:
    """The number of functions that are called while it runs, in Python and in C."""
    count = 0

    def listen(frame: FrameType, event: str, value: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(listen)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def peak_bytes(act: Callable[[], object]) -> int:
    """The maximum of bytes allocated while it runs, beyond those before it."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

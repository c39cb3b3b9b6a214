"""Ordinary scheduling for what computes, whatever priority a benchmark was started with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def time_sharing() -> Iterator[None]:
    """The usual scheduling class for this thread in the block, and for what it starts there.

    `chrt -f` keeps other work away from processes that sleep most of the time. Of those that
    compute it lets none give way to another: with as many of them as there are cores, the driver
    waits for the end of a pass.
    """
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    if policy == os.SCHED_OTHER:
        yield
        return
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameters)

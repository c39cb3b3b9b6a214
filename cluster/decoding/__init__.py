"""Every decision of a driver, without I/O and without a clock: events in, instructions out."""

from __future__ import annotations

__all__ = [
    "at_hand",
    "drafters",
    "events",
    "instructions",
    "policy",
    "predicted",
    "reported_target",
    "scheduler",
]

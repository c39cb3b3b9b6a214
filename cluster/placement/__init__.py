"""Ray: where workers run, how they start, and how they are started again."""

from __future__ import annotations

__all__ = [
    "controller",
    "launch",
    "plan",
]

"""Models that have a name: where their checkpoints are, and how they are fetched."""

from __future__ import annotations

__all__ = [
    "catalog",
    "fetch",
    "hub",
    "learned",
    "stand_in",
]

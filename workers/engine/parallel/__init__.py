"""A model divided among ranks, and how the ranks add up."""

from __future__ import annotations

__all__ = [
    "cuts",
    "group",
    "sharding",
]

"""The cluster of `up`, or a private one: our own Ray head, its record on disk, signals."""

from __future__ import annotations

__all__ = [
    "cluster",
    "packages",
    "ray_head",
    "record",
    "signals",
]

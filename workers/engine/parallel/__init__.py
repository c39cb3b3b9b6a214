"""Tensor parallelism: divides a model among ranks, and adds up their results."""

from __future__ import annotations

__all__ = [
    "group",
    "sharding",
    "weight_cuts",
]

"""The engine on a CPU."""

from __future__ import annotations

__all__ = [
    "engine",
    "kv_cache",
    "linears",
]

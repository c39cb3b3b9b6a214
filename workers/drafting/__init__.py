"""Drafters: the sequences that one drafts for, the trees of candidates after them, the passes that
grow these trees, and the gRPC service.
"""

from __future__ import annotations

__all__ = [
    "chances",
    "desk",
    "drafter",
    "expansions",
    "growth",
    "kind",
    "proposal",
    "rows_ahead",
    "service",
    "shares",
    "stopping",
    "tree",
    "wire",
]

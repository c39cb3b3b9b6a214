"""Drafters: the sequences that one drafts for, the trees of candidates after them, the passes that
grow these trees, and the gRPC service.
"""

from __future__ import annotations

__all__ = [
    "chances",
    "desk",
    "draft_stopping",
    "drafter",
    "expansions",
    "fair_shares",
    "growth",
    "kind",
    "proposal",
    "rows_ahead",
    "service",
    "tree",
    "wire",
]

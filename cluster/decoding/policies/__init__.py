"""The lookahead policies of this repository, a file each (policy.py)."""

from __future__ import annotations

__all__ = [
    "chain",
    "fanout",
    "off",
]

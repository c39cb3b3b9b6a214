"""Who may call a server, and how much: API keys and their limits."""

from __future__ import annotations

__all__ = [
    "gate",
    "keys",
]

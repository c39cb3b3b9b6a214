"""Who may call a server, and how much: API keys and their limits; and the server's certificate."""

from __future__ import annotations

__all__ = [
    "calls",
    "certificate",
    "gate",
    "keys",
]

"""OpenAI's batch files: rows in, answers out, and a journal to continue a killed run from."""

from __future__ import annotations

__all__ = [
    "run",
]

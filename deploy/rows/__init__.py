"""Files of prompts as requests: reading, running, comparing, writing."""

from __future__ import annotations

__all__ = [
    "batch",
    "comparison",
    "inputs",
    "measure",
    "outputs",
    "peers",
    "verifier",
]

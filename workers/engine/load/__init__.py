"""Reading a checkpoint's folder into a model."""

from __future__ import annotations

__all__ = [
    "checkpoint",
    "model",
]

"""Loads a model from a checkpoint's folder."""

from __future__ import annotations

__all__ = [
    "checkpoint",
    "model",
    "vocabulary",
]

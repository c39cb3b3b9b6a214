"""Distilling drafters: a target's answers, and students that learn to draft them."""

from __future__ import annotations

__all__ = ["network", "run", "sampling", "training"]

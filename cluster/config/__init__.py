"""The configuration: one TOML file, closed and frozen, overridden by the environment."""

from __future__ import annotations

__all__ = [
    "fields",
    "load",
    "model",
    "plan_question",
]

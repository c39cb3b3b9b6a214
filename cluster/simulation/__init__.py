"""A virtual clock and latency models that drive `decoding` unchanged: what `paceline plan` asks."""

from __future__ import annotations

__all__ = [
    "closed_forms",
    "fleet",
    "layout",
    "plan_answer",
    "trial",
]

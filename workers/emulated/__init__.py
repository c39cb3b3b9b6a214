"""Emulated devices: latency profiles and text made by a hash in place of models, and a relay that
adds network delay.
"""

from __future__ import annotations

__all__ = [
    "derived",
    "device_wait",
    "drafter",
    "latency_profiles",
    "replay_proposer",
    "replay_text",
    "target",
]

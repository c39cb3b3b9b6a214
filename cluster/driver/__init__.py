"""The driver: an asyncio loop that joins `decoding` to the gRPC streams of targets and drafters,
and serves callers.
"""

from __future__ import annotations

__all__ = [
    "dispatch",
    "drafter_links",
    "driver",
    "fitting",
    "generation",
    "meters",
    "pool_lookup",
    "requests",
    "round_tap",
    "service",
    "steady",
    "stop_strings",
    "target_groups",
    "target_links",
    "text",
    "worker_messages",
]

"""The engine: a loaded checkpoint, its KV blocks, and steps that feed tokens and return logits.

Only `open.py` chooses between the engine for CPUs and the engine for GPUs.
"""

from __future__ import annotations

__all__ = [
    "engine",
    "forward",
    "kv_blocks",
    "local_cache",
    "memory",
    "open",
    "options",
    "slices",
]

"""A checkpoint, loaded: its KV blocks, and the step that feeds tokens and returns rows of logits.
`open.py` is the only place that chooses between the CPU's and the GPU's engine.
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

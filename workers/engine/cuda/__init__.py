"""The engine on a GPU: attention, graphs, and kernels of our own.

All of it but kernels and graphs also runs on a CPU, where a reference replaces the kernel of
attention: tests prove it this way without a GPU. Our own kernels run where they are enabled
(workers/process/kernels.py).
"""

from __future__ import annotations

__all__ = [
    "engine",
    "kv_cache",
]

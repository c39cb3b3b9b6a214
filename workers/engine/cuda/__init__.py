"""The engine on a GPU: attention, graphs, and kernels of our own.

Everything except kernels and graphs also runs on a CPU, where a plain reference replaces the
attention kernel. So tests cover it without a GPU. Our own kernels run if they are enabled
(workers/process/kernels.py).
"""

from __future__ import annotations

__all__ = [
    "engine",
    "kv_cache",
    "linears",
]

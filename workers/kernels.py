"""Whether our own GPU kernels can run. They are written in Triton, which torch's CUDA builds bring.

Where they cannot, torch's operations compute the same, more slowly. In tests Triton's interpreter
runs them on CPU tensors (TRITON_INTERPRET=1, tests/conftest.py).
"""

from __future__ import annotations

import functools
import importlib.util

import torch


def can_run_kernels(device: torch.device) -> bool:
    """Whether tensors of this device can be given to our kernels."""
    return device.type == "cuda" and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None

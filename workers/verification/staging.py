"""Copies between host and device. Only `to_host` waits for the device.

Host memory is pinned if the device is a GPU; torch's allocator keeps it until the copy is done.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor on the device."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type != "cuda":
        return tensor.clone()
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(*tensors: Tensor) -> list[Tensor]:
    """CPU copies of `tensors`. Waits until the device has done all work queued before."""
    if tensors[0].device.type != "cuda":
        return [tensor.cpu() for tensor in tensors]
    copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(tensors[0].device))
    done.synchronize()
    return copies

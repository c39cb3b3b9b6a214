"""Makes the elementwise parts of a model independent of what else is in the batch.

torch's vectorized kernels compute the last elements of an array, and of each thread's share, with
scalar code that rounds differently (silu, gelu). Which elements these are depends on the batch and
the number of threads. So activations run over slabs that one thread computes and whose size is a
multiple of the vector width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_SLAB = 32768
"""Elements that torch gives to one thread (at::internal::GRAIN_SIZE)."""
_ALIGNMENT = 64
"""A multiple of the elements that any vector loop takes at a time (2 x 16 float32 for AVX-512)."""


class SlabActivation(nn.Module):
    """An elementwise activation whose result for an element depends on that element only."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, values: Tensor) -> Tensor:
        """The activation of each element, in the shape of `values`."""
        count = values.numel()
        # If rows are not contiguous, torch goes row by row.
        piece = count if values.is_contiguous() else values.shape[-1]
        if count <= _SLAB and piece % _ALIGNMENT == 0:
            result: Tensor = self.activation(values)
            return result
        flat = nn.functional.pad(values.reshape(-1), (0, -count % _ALIGNMENT))
        slabs = [self.activation(slab) for slab in torch.split(flat, _SLAB)]
        return torch.cat(slabs)[:count].view(values.shape)


def replace_activations(model: nn.Module) -> None:
    """Wrap every activation module of `model` in a SlabActivation."""
    for parent in list(model.modules()):
        if isinstance(parent, SlabActivation):
            continue
        for name, child in list(parent.named_children()):
            if _is_activation(child):
                setattr(parent, name, SlabActivation(child))


def _is_activation(module: nn.Module) -> bool:
    home = type(module).__module__
    return home in ("transformers.activations", "torch.nn.modules.activation")

"""The tensors that hold keys and values, in blocks of 128 positions, head-major.

Shapes: L layers, H key/value heads, N blocks, D head size, S = N x 128 slots.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_SIZE = 128
"""Positions of a block, and of an attention chunk."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's keys and values: the same memory by slot and by block."""

    slots_2HSD: Tensor
    """[2 x H, S, D]: all heads' keys, then all heads' values."""
    keys_NHBD: Tensor
    values_NHBD: Tensor


class CpuKvCache:
    """Buffers for `num_blocks` blocks, allocated once and zeroed. Unused blocks take no memory.

    By torch's operations, masked slots must hold finite numbers: they have weight 0, and 0 times
    NaN is NaN. So a block is also cleared (`clear`) when a sequence begins to use it: an earlier
    sequence that ended because of a NaN may have left the NaN there. Our own kernels use no slot
    that the sequence has not written.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_heads: int,
        head_size: int,
        num_blocks: int,
        dtype: torch.dtype,
    ) -> None:
        self.num_blocks = num_blocks
        self.layers = [self._make_layer(num_heads, head_size, dtype) for _ in range(num_layers)]

    def _make_layer(self, num_heads: int, head_size: int, dtype: torch.dtype) -> LayerCache:
        shape = (2 * num_heads, self.num_blocks * BLOCK_SIZE, head_size)
        # The system's zeros: a page takes memory once it is written. numpy's would lie in huge
        # pages, where the first token of each head takes 2 MiB.
        num_bytes = math.prod(shape) * dtype.itemsize
        zeros = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        slots = torch.frombuffer(zeros, dtype=dtype).view(shape)
        blocks = slots.view(2, num_heads, -1, BLOCK_SIZE, head_size).transpose(1, 2)
        return LayerCache(slots, blocks[0], blocks[1])

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero these blocks in all layers."""
        for layer in self.layers:
            for block in blocks:
                layer.keys_NHBD[block].zero_()
                layer.values_NHBD[block].zero_()

    def copy_slots(self, sources: Tensor, targets: Tensor) -> None:
        """Copy keys and values between slots in all layers. All reads come before all writes."""
        for layer in self.layers:
            slots = layer.slots_2HSD
            slots.index_copy_(1, targets, slots.index_select(1, sources))


def block_bytes(*, num_layers: int, num_heads: int, head_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    return 2 * num_layers * num_heads * head_size * BLOCK_SIZE * dtype.itemsize

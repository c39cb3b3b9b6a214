"""The tensor that holds keys and values, in pages of 256 positions: a page is a KV block.

One tensor has all layers, so that KV is moved in all layers at once. A layer's part has the layout
that varlen_attn's block table needs.

Shapes: L layers, N pages, P positions of a page, H key/value heads, D head size, S = N x P slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PAGE_SIZE = 256
"""Positions of a page. FlashAttention requires a multiple of 256."""
KEY_BLOCK = 64
"""Keys that our attention kernels process at once. Pages are whole blocks."""


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's keys and values: the same memory by page and by slot."""

    keys_NPHD: Tensor
    values_NPHD: Tensor
    keys_SHD: Tensor
    values_SHD: Tensor


class PagedKV:
    """`num_blocks` pages, and after them one scratch page, to which padding is written.

    All pages are zeroed, because padding is read too and must be finite.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_heads: int,
        head_size: int,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.scratch_block = num_blocks
        shape = (num_layers, 2, num_blocks + 1, PAGE_SIZE, num_heads, head_size)
        whole = torch.zeros(shape, dtype=dtype, device=device)
        # [keys and values of all layers, S, H x D]
        self._slots = whole.view(2 * num_layers, (num_blocks + 1) * PAGE_SIZE, -1)
        self.layers = [
            LayerPages(keys, values, keys.flatten(0, 1), values.flatten(0, 1))
            for keys, values in whole
        ]

    def copy_slots(self, sources: Tensor, targets: Tensor) -> None:
        """Copy keys and values between slots in all layers. All reads come before all writes."""
        self._slots.index_copy_(1, targets, self._slots.index_select(1, sources))


def slot_of(block_table: Sequence[int], position: int) -> int:
    """The index of a sequence's position among all slots."""
    return block_table[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE


def kv_bytes(*, num_layers: int, num_heads: int, head_size: int, dtype: torch.dtype) -> int:
    """Bytes of one position over all layers, keys and values."""
    return 2 * num_layers * num_heads * head_size * dtype.itemsize


def page_bytes(*, num_layers: int, num_heads: int, head_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page over all layers, keys and values."""
    position = kv_bytes(
        num_layers=num_layers, num_heads=num_heads, head_size=head_size, dtype=dtype
    )
    return position * PAGE_SIZE

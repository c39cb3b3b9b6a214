"""The tensor that holds keys and values, in pages of 256 positions: a page is a KV block.

One tensor has all layers, so that KV is moved in all layers at once. A layer's part has the layout
that varlen_attn's block table needs.

Keys and values have the model's dtype, or are float8 (kv_cache_dtype = "fp8"): a number is then
divided by its head's scale (the checkpoint's, or 1) and rounded as it is stored, and attention
widens it and multiplies by the scale. So what a slot holds depends on its own token only.

Shapes: L layers, N pages, P positions of a page, H key/value heads, D head size, S = N x P slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engine.options import KvDtype

PAGE_SIZE = 256
"""Positions of a page. FlashAttention requires a multiple of 256."""
KEY_BLOCK = 64
"""Keys that our attention kernels process at once. Pages are whole blocks."""

FLOAT8 = torch.float8_e4m3fn
LARGEST_FLOAT8 = 448.0
"""Larger numbers are stored as this one: the type has no infinity."""


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's keys and values: the same memory by page and by slot.

    `scales_2H`: float32, the scales of float8 keys, then of values, by head; None: all are 1.
    """

    keys_NPHD: Tensor
    values_NPHD: Tensor
    keys_SHD: Tensor
    values_SHD: Tensor
    scales_2H: Tensor | None = None

    def store(self, slots_T: Tensor, keys_THD: Tensor, values_THD: Tensor) -> None:
        """Write keys and values into their slots, rounded to the dtype of the pages."""
        key_scales_H, value_scales_H = self.scales
        for pages_SHD, rows_THD, scales_H in (
            (self.keys_SHD, keys_THD, key_scales_H),
            (self.values_SHD, values_THD, value_scales_H),
        ):
            rows_THD = rounded(rows_THD, pages_SHD.dtype, scales_H)
            _writable(pages_SHD).index_copy_(0, slots_T, _writable(rows_THD))

    @property
    def scales(self) -> tuple[Tensor | None, Tensor | None]:
        """The scales [H] of keys and of values, or None for each."""
        return (None, None) if self.scales_2H is None else (self.scales_2H[0], self.scales_2H[1])


class CudaKvCache:
    """`num_blocks` pages, and after them one scratch page, to which padding is written.

    All pages are zeroed, because padding is read too and must be finite. `scales_L2H`: of float8
    pages, by layer as in LayerPages.
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
        scales_L2H: Tensor | None = None,
    ) -> None:
        assert scales_L2H is None or scales_L2H.shape == (num_layers, 2, num_heads)
        self.num_blocks = num_blocks
        self.scratch_block = num_blocks
        shape = (num_layers, 2, num_blocks + 1, PAGE_SIZE, num_heads, head_size)
        whole = torch.zeros(shape, dtype=dtype, device=device)
        # [keys and values of all layers, S, H x D]
        self._slots = _writable(whole).view(2 * num_layers, (num_blocks + 1) * PAGE_SIZE, -1)
        self.layers = [
            LayerPages(
                *(keys, values, keys.flatten(0, 1), values.flatten(0, 1)),
                None if scales_L2H is None else scales_L2H[layer],
            )
            for layer, (keys, values) in enumerate(whole)
        ]

    def copy_slots(self, sources: Tensor, targets: Tensor) -> None:
        """Copy keys and values between slots in all layers. All reads come before all writes."""
        self._slots.index_copy_(1, targets, self._slots.index_select(1, sources))


def rounded(numbers: Tensor, dtype: torch.dtype, scales_H: Tensor | None = None) -> Tensor:
    """Numbers [..., H, D] as pages of `dtype` hold them. `scales_H`: of float8 pages."""
    if dtype == FLOAT8:
        if scales_H is not None:
            numbers = numbers.to(torch.float32) / scales_H[:, None]
        numbers = numbers.clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8)
    return numbers.to(dtype)


def widened(numbers: Tensor, scales_H: Tensor | None) -> Tensor:
    """What numbers [..., H, D] of pages stand for: themselves, or with scales float32."""
    return numbers if scales_H is None else numbers.to(torch.float32) * scales_H[:, None]


def _writable(pages: Tensor) -> Tensor:
    """A view of the same shape. torch writes no float8 by index, but bytes."""
    return pages.view(torch.uint8) if pages.dtype == FLOAT8 else pages


def kv_dtype_of(asked: KvDtype, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the pages for a model whose activations are `dtype`."""
    return FLOAT8 if asked == "fp8" else dtype


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

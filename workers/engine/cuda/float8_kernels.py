"""Triton kernels that round the rows of products to float8: one of its own, and a part of others.

The part is the last act of a kernel that makes such rows (layer_kernels.py), which then need not be
written and read again. The bits are those of linears.to_fp8 in all of them.

Import it only where kernels can run. Shapes: T rows, N features, G groups of features that share a
scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.engine.cuda.kv_cache import FLOAT8, LARGEST_FLOAT8
from workers.engine.cuda.linears import SMALLEST_SCALE, RoundedRows, Rounding, to_fp8
from workers.process.kernels import on_device

LARGEST_ROW = 32768
"""Maximum features of a row that one program keeps in its registers."""
_MOST_WARPS = 16
_ELEMENTS_OF_A_WARP = 256
"""One load of 16 bytes per thread, for a type of 2 bytes."""
_ROUNDED_OF_A_PROGRAM = 1024
"""If a row has several scales."""
_LARGEST, _INVERSE = tl.constexpr(LARGEST_FLOAT8), tl.constexpr(1 / LARGEST_FLOAT8)
_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)


def warps_of(elements: int) -> int:
    """Warps for a program that processes this many elements at once."""
    return max(1, min(_MOST_WARPS, elements // _ELEMENTS_OF_A_WARP))


class Rounded:
    """Rows [T, N] in float8 that a kernel writes with `store_row`.

    `arguments`: what it writes to, and its input scale. `constants`: WIDTH (features that share a
    scale; 0: nothing is rounded) and HAS_SCALE.
    """

    def __init__(self, num_rows: int, size: int, rounding: Rounding | None, like: Tensor) -> None:
        """`rounding` None: the kernel does not round, and gets `like` in place of each tensor."""
        self.rows: RoundedRows | None = None
        self.arguments = (like, like, like)
        self.constants = {"WIDTH": 0, "HAS_SCALE": False}
        if rounding is None:
            return
        width, given = rounding.block or size, rounding.input_scale
        assert size % width == 0, (size, width)
        steps_TN = torch.empty((num_rows, size), dtype=FLOAT8, device=like.device)
        scales_GT = like.new_empty((size // width, num_rows), dtype=torch.float32)
        self.rows = RoundedRows(
            steps_TN, scales_GT.view(num_rows, 1) if rounding.block is None else scales_GT.t()
        )
        self.arguments = (steps_TN, scales_GT, scales_GT if given is None else given)
        self.constants = {"WIDTH": width, "HAS_SCALE": given is not None}


def round_rows(rows_TN: Tensor, rounding: Rounding) -> RoundedRows:
    """As linears.to_fp8, with the same bits."""
    num_rows, size = rows_TN.shape
    width = rounding.block or size
    if width > LARGEST_ROW:
        return to_fp8(rows_TN, rounding)
    rounded = Rounded(num_rows, size, rounding, rows_TN)
    assert rounded.rows is not None
    num_groups, padded = size // width, triton.next_power_of_2(width)
    groups = min(triton.next_power_of_2(num_groups), max(1, _ROUNDED_OF_A_PROGRAM // padded))
    with on_device(rows_TN.device):
        _round_rows[(num_rows, triton.cdiv(num_groups, groups))](
            rows_TN.contiguous(),
            *rounded.arguments,
            num_rows,
            NUM_GROUPS=num_groups,
            GROUPS=groups,
            BLOCK=padded,
            **rounded.constants,
            num_warps=warps_of(groups * padded),
        )
    return rounded.rows


@triton.jit
def in_float8(numbers):
    """The numbers, between the largest ones of float8. What is not a number stays so."""
    return tl.clamp(numbers, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _scale_of(largest):
    return tl.maximum(largest * _INVERSE, _SMALLEST_SCALE)


@triton.jit
def store_row(
    result,
    plain,
    steps,
    scales,
    input_scale,
    row,
    first,
    num_rows,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    """Store BLOCK numbers of a row, from feature `first` on: as they are in `plain` if WIDTH is 0,
    else in float8, with their scales.

    `result`: 0 beyond SIZE. If groups of features have scales of their own, BLOCK has whole groups.
    """
    if WIDTH == 0:
        places = first + tl.arange(0, BLOCK)
        tl.store(plain + row * SIZE + places, result, mask=places < SIZE)
    else:
        numbers = result.to(tl.float32)
        # The compiler then spreads the row over threads as if it were stored as it is. So sums over
        # the row have the same order.
        CONTIGUOUS: tl.constexpr = 128 // result.dtype.primitive_bitwidth
        places = first + tl.max_contiguous(tl.arange(0, BLOCK), CONTIGUOUS)
        at = steps + row * SIZE + places
        if HAS_SCALE or WIDTH >= SIZE:
            scale = (
                tl.load(input_scale) if HAS_SCALE else _scale_of(tl.max(tl.abs(numbers), axis=0))
            )
            rounded = in_float8(tl.div_rn(numbers, tl.zeros_like(numbers) + scale))
            tl.store(at, rounded.to(steps.dtype.element_ty), mask=places < SIZE)
            if first == 0:
                tl.store(scales + row, scale)
        else:
            GROUPS: tl.constexpr = BLOCK // WIDTH
            numbers_GW = tl.reshape(numbers, (GROUPS, WIDTH))
            scale_G = _scale_of(tl.max(tl.abs(numbers_GW), axis=1))
            rounded_GW = in_float8(tl.div_rn(numbers_GW, tl.expand_dims(scale_G, 1)))
            rounded = tl.reshape(rounded_GW, (BLOCK,))
            tl.store(at, rounded.to(steps.dtype.element_ty), mask=places < SIZE)
            group = first // WIDTH + tl.arange(0, GROUPS)
            own = scales + group.to(tl.int64) * num_rows + row
            tl.store(own, scale_G, mask=group < SIZE // WIDTH)


@triton.jit(do_not_specialize=("num_rows",))
def _round_rows(
    rows,
    steps,
    scales,
    input_scale,
    num_rows,
    NUM_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    """Processes a few groups of one row, each with a scale of its own."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    place = tl.arange(0, BLOCK)[None, :]
    inside = (group[:, None] < NUM_GROUPS) & (place < WIDTH)
    own = row * (NUM_GROUPS * WIDTH) + group[:, None] * WIDTH + place
    numbers = tl.load(rows + own, mask=inside, other=0.0).to(tl.float32)
    if HAS_SCALE:
        scale = tl.load(input_scale) + tl.zeros((GROUPS,), tl.float32)
    else:
        scale = _scale_of(tl.max(tl.abs(numbers), axis=1))
    # Rounded as IEEE asks: `/` may be off by a unit of the last place.
    result = in_float8(tl.div_rn(numbers, tl.expand_dims(scale, 1)))
    tl.store(steps + own, result.to(steps.dtype.element_ty), mask=inside)
    tl.store(scales + group.to(tl.int64) * num_rows + row, scale, mask=group < NUM_GROUPS)

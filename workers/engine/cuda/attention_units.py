"""Units that a sequence's keys are cut into, for its attention, and how many programs share them.

Units begin at positions that are the same for every sequence, whoever computes them. They grow with
their position, which bounds what has to be stored of a long sequence.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

_SMALL, _MIDDLE, _LARGE = tl.constexpr(256), tl.constexpr(1024), tl.constexpr(4096)
"""Keys of a unit: of each of the first 64, of the next 48, and of those after them."""
_NUM_SMALL, _NUM_MIDDLE = tl.constexpr(64), tl.constexpr(48)
_SMALL_END, _MIDDLE_END = tl.constexpr(16_384), tl.constexpr(65_536)

_ENOUGH_PROGRAMS = 512
"""With so many tiles times heads the device is busy without sharing out a tile's units."""
_PROGRAMS = 1024
"""About so many programs where they are shared out: those of padding end at once."""


def num_units(num_keys: int) -> int:
    """Units of so many keys, one that is begun included."""
    small: int = math.ceil(min(num_keys, _SMALL_END.value) / _SMALL.value)
    past_small = max(min(num_keys, _MIDDLE_END.value) - _SMALL_END.value, 0)
    middle: int = math.ceil(past_small / _MIDDLE.value)
    large: int = math.ceil(max(num_keys - _MIDDLE_END.value, 0) / _LARGE.value)
    return small + middle + large


def share_out(units: int, num_tiles: int, *, unit_bytes: int, scratch_bytes: int) -> int:
    """How many programs a tile's units are shared out among; one folds them as it goes.

    `num_tiles` counts each column of the heads; what a unit gives takes `unit_bytes` for all.
    """
    if num_tiles >= _ENOUGH_PROGRAMS or units * unit_bytes > scratch_bytes:
        return 1
    return min(units, math.ceil(_PROGRAMS / num_tiles))


@triton.jit
def units_of(num_keys):
    """As `num_units`."""
    small = tl.minimum(num_keys, _SMALL_END)
    middle = tl.maximum(tl.minimum(num_keys, _MIDDLE_END) - _SMALL_END, 0)
    large = tl.maximum(num_keys - _MIDDLE_END, 0)
    return (
        (small + (_SMALL - 1)) // _SMALL
        + (middle + (_MIDDLE - 1)) // _MIDDLE
        + (large + (_LARGE - 1)) // _LARGE
    )


@triton.jit
def start_of(unit):
    """The first position of a unit."""
    small = tl.minimum(unit, _NUM_SMALL)
    middle = tl.maximum(tl.minimum(unit - _NUM_SMALL, _NUM_MIDDLE), 0)
    large = tl.maximum(unit - (_NUM_SMALL + _NUM_MIDDLE), 0)
    return small * _SMALL + middle * _MIDDLE + large * _LARGE

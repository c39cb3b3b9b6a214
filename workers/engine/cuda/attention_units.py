"""The units into which a sequence's keys are cut, and how many programs share them.

Units begin at the same positions in every sequence, whichever program computes them. Later units
are larger, which bounds what must be stored for a long sequence.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

_SMALL, _MIDDLE, _LARGE = tl.constexpr(256), tl.constexpr(1024), tl.constexpr(4096)
"""Keys per unit: in the first 64 units, in the next 48, and in those after them."""
_NUM_SMALL, _NUM_MIDDLE = tl.constexpr(64), tl.constexpr(48)
_SMALL_END, _MIDDLE_END = tl.constexpr(16_384), tl.constexpr(65_536)

_ENOUGH_PROGRAMS = 512
"""From this number of tiles times heads on, the device is busy without sharing a tile's units."""
_PROGRAMS = 1024
"""Approximate number of programs if units are shared. Programs for padding end at once."""


def num_units(num_keys: int) -> int:
    """The number of units of `num_keys` keys, including one that is not full."""
    small: int = math.ceil(min(num_keys, _SMALL_END.value) / _SMALL.value)
    past_small = max(min(num_keys, _MIDDLE_END.value) - _SMALL_END.value, 0)
    middle: int = math.ceil(past_small / _MIDDLE.value)
    large: int = math.ceil(max(num_keys - _MIDDLE_END.value, 0) / _LARGE.value)
    return small + middle + large


def share_out(units: int, num_tiles: int, *, unit_bytes: int, scratch_bytes: int) -> int:
    """How many programs share a tile's units. A single program folds them as it goes.

    `num_tiles` counts tiles times columns of heads. `unit_bytes`: storage per unit over all rows.
    """
    if num_tiles >= _ENOUGH_PROGRAMS or units * unit_bytes > scratch_bytes:
        return 1
    return min(units, math.ceil(_PROGRAMS / num_tiles))


@triton.jit
def units_of(num_keys):
    """As `num_units`, on the device."""
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

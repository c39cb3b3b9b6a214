"""Philox 4x32-10 in numpy: a hundred thousand words in a fraction of a millisecond.

Salmon, Moraes, Dror and Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). There is no
generator state, so there is nothing to save, restore, roll back or send.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
"""What each round adds to the two words of the key."""
_FACTORS = tuple(np.uint64(multiplier) for multiplier in MULTIPLIERS)
_LOW_WORD = 0xFFFFFFFF
_LOW_WORD_MASK = np.uint64(_LOW_WORD)
_WORD_BITS = np.uint64(32)

_BLOCK = 24_576
"""Counters per block. With fewer, calls dominate; with more, data leaves a core's cache."""

LANES = 4
"""Number of words that share one counter."""

Key = tuple[int, int]
"""Two 32-bit words."""


_Pair = tuple[NDArray[np.uint64], NDArray[np.uint64]]
"""Words 0 and 2 of some counters, or words 1 and 3."""


def key_of_seed(seed: int) -> Key:
    """The key of an unsigned 64-bit seed, its low word first."""
    assert 0 <= seed < 2**64, f"a seed is an unsigned 64-bit number, got {seed}"
    return seed & _LOW_WORD, seed >> 32


def philox_4x32(counter_N4: NDArray[np.integer], key: Key) -> NDArray[np.uint32]:
    """The words [N, 4] of N counters of four 32-bit words under one key."""
    counter_4N = np.asarray(counter_N4).T.astype(np.uint64)
    return words_of_counters(counter_4N, key)


def words_of_counters(counter_4N: NDArray[np.uint64], key: Key) -> NDArray[np.uint32]:
    """The words [N, 4] of counters [4, N], whose words are in rows."""

    def begin(_rows: slice, block: slice, even: _Pair, odd: _Pair) -> None:
        even[0][0], odd[0][0], even[1][0], odd[1][0] = counter_4N[:, block]

    words_1N4 = _words((1, counter_4N.shape[1]), _round_keys([key]), 0, begin)
    return words_1N4.reshape(-1, LANES)


def words_of_ranges(
    size: int, rests: Sequence[tuple[int, int, int]], keys: Sequence[Key]
) -> NDArray[np.uint32]:
    """The words [A, size, 4] of the counters (0, *rest), (1, *rest), ... (size - 1, *rest).

    `rests` and `keys` have one entry per row. The result equals words_of_counters for each row, but
    costs less: the first round multiplies only what all rows share, the second round still
    multiplies one constant factor, and rows with few counters share calls.
    """
    high_N, low_N = _first_products(size)
    round_keys = _round_keys(keys)
    rest_3A1 = np.array(rests, dtype=np.uint64).T[:, :, None]
    first_A1 = rest_3A1[1] * _FACTORS[1]
    second_A1 = ((first_A1 >> _WORD_BITS) ^ rest_3A1[0] ^ round_keys[0, 0]) * _FACTORS[0]
    first_keys_A1 = rest_3A1[2] ^ round_keys[0, 1]
    low_keys_A1 = (first_A1 & _LOW_WORD_MASK) ^ round_keys[1, 0]
    high_keys_A1 = (second_A1 >> _WORD_BITS) ^ round_keys[1, 1]
    second_low_A1 = second_A1 & _LOW_WORD_MASK

    def begin(rows: slice, block: slice, even: _Pair, odd: _Pair) -> None:
        np.bitwise_xor(high_N[block], first_keys_A1[rows], out=even[1])
        np.multiply(even[1], _FACTORS[1], out=odd[0])
        np.right_shift(odd[0], _WORD_BITS, out=even[0])
        np.bitwise_xor(even[0], low_keys_A1[rows], out=even[0])
        np.bitwise_xor(low_N[block], high_keys_A1[rows], out=even[1])
        odd[1][:] = second_low_A1[rows]

    return _words((len(rests), size), round_keys, 2, begin)


@functools.lru_cache(maxsize=4)
def _first_products(size: int) -> _Pair:
    """High and low words of the first multiplier's products with 0 to size - 1."""
    products_N = np.arange(size, dtype=np.uint64) * _FACTORS[0]
    return products_N >> _WORD_BITS, products_N & _LOW_WORD_MASK


def _words(
    shape: tuple[int, int],
    round_keys: NDArray[np.uint64],
    first_round: int,
    begin: Callable[[slice, slice, _Pair, _Pair], None],
) -> NDArray[np.uint32]:
    """The words [A, N, 4] after the rounds from `first_round` on.

    `begin` writes the even and odd words of a block of rows and counters before these rounds.
    """
    num_rows, size = shape
    words_AN4 = np.empty((num_rows, size, LANES), dtype=np.uint32)
    width = max(min(size, _BLOCK), 1)
    height = max(min(num_rows, _BLOCK // width), 1)
    buffers = [np.empty(height * width, dtype=np.uint64) for _ in range(6)]
    for top in range(0, num_rows, height):
        rows = slice(top, min(top + height, num_rows))
        for start in range(0, size, width):
            block = slice(start, min(start + width, size))
            form = (rows.stop - top, block.stop - start)
            arrays = [buffer[: form[0] * form[1]].reshape(form) for buffer in buffers]
            even, odd, products = (arrays[0], arrays[1]), (arrays[2], arrays[3]), arrays[4:]
            begin(rows, block, even, odd)
            for number in range(first_round, ROUNDS):
                _round(even, odd, (products[0], products[1]), round_keys[number, :, rows])
                odd, products = (products[1], products[0]), list(odd)
            words_BC4 = words_AN4[rows, block]
            words_BC4[..., 0], words_BC4[..., 1] = even[0], odd[0]
            words_BC4[..., 2], words_BC4[..., 3] = even[1], odd[1]
    return words_AN4


def _round(even: _Pair, odd: _Pair, products: _Pair, keys_2A1: NDArray[np.uint64]) -> None:
    """Overwrite the even words. The new odd words are the products, the second one first.

    Words are in the low halves of uint64, so that one multiplication gives both halves of a
    product. The odd words keep the high half, which the mask after the xor drops.
    """
    for half in (0, 1):
        np.multiply(even[half], _FACTORS[half], out=products[half])
    for half in (0, 1):
        np.right_shift(products[1 - half], _WORD_BITS, out=even[half])
        np.bitwise_xor(even[half], odd[half], out=even[half])
        np.bitwise_xor(even[half], keys_2A1[half], out=even[half])
        np.bitwise_and(even[half], _LOW_WORD_MASK, out=even[half])


def _round_keys(keys: Sequence[Key]) -> NDArray[np.uint64]:
    """Each row's key in each round: [rounds, 2, A, 1]."""
    steps = np.arange(ROUNDS, dtype=np.uint64)[:, None] * np.array(KEY_STEPS, dtype=np.uint64)
    keys_2A = np.array(keys, dtype=np.uint64).T
    return ((keys_2A + steps[:, :, None]) & _LOW_WORD_MASK)[..., None]

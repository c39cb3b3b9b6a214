"""Philox 4x32-10 in numpy: a hundred thousand words in a fraction of a millisecond.

Salmon, Moraes, Dror and Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). There is no
generator state, so there is nothing to save, restore, roll back or send.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_MULTIPLIERS_21 = np.array(_MULTIPLIERS, dtype=np.uint64)[:, None]
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW_WORD = 0xFFFFFFFF
_LOW_WORD_MASK = np.uint64(_LOW_WORD)
_WORD_BITS = np.uint64(32)

LANES = 4
"""Words that share one counter."""

Key = tuple[int, int]
"""Two 32-bit words."""


def key_of_seed(seed: int) -> Key:
    """The key of an unsigned 64-bit seed: its low word first."""
    assert 0 <= seed < 2**64, f"a seed is an unsigned 64-bit number, got {seed}"
    return seed & _LOW_WORD, seed >> 32


def philox_4x32(counter_N4: NDArray[np.integer], key: Key) -> NDArray[np.uint32]:
    """The words [N, 4] of N counters of four 32-bit words under one key."""
    counter_4N = np.asarray(counter_N4).T.astype(np.uint64)
    return words_of_counters(counter_4N[0::2], counter_4N[1::2], key)


def words_of_counters(
    even_2N: NDArray[np.uint64], odd_2N: NDArray[np.uint64], key: Key
) -> NDArray[np.uint32]:
    """The words [N, 4] of counters with these words 0 and 2 (overwritten), and 1 and 3.

    N may be 1 in `odd_2N`: the same for all.
    """
    return _finish(even_2N, odd_2N, key, 0)


def words_of_range(size: int, rest: tuple[int, int, int], key: Key) -> NDArray[np.uint32]:
    """The words [size, 4] of the counters (0, *rest), (1, *rest), ... (size - 1, *rest).

    What words_of_counters gives for them, for less: the first round multiplies two constants
    and what every key has in common, and the second one constant still.
    """
    high_N, low_N = _first_products(size)
    (key_0, key_1), (next_0, next_1) = _round_key(key, 0), _round_key(key, 1)
    product = rest[1] * _MULTIPLIERS[1]
    even_0, odd_0 = (product >> 32) ^ rest[0] ^ key_0, product & _LOW_WORD
    even_2N = np.empty((2, size), dtype=np.uint64)
    odd_2N = np.empty((2, size), dtype=np.uint64)
    np.bitwise_xor(high_N, np.uint64(rest[2] ^ key_1), out=even_2N[1])
    np.multiply(even_2N[1], _MULTIPLIERS_21[1], out=odd_2N[0])
    product = even_0 * _MULTIPLIERS[0]
    np.right_shift(odd_2N[0], _WORD_BITS, out=even_2N[0])
    np.bitwise_xor(even_2N[0], np.uint64(odd_0 ^ next_0), out=even_2N[0])
    np.bitwise_xor(low_N, np.uint64((product >> 32) ^ next_1), out=even_2N[1])
    odd_2N[1] = product & _LOW_WORD
    return _finish(even_2N, odd_2N, key, 2)


@functools.lru_cache(maxsize=4)
def _first_products(size: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """High and low words of the first multiplier's products with 0 to size - 1."""
    products_N = np.arange(size, dtype=np.uint64) * _MULTIPLIERS_21[0]
    return products_N >> _WORD_BITS, products_N & _LOW_WORD_MASK


def _finish(
    even_2N: NDArray[np.uint64], odd_2N: NDArray[np.uint64], key: Key, first_round: int
) -> NDArray[np.uint32]:
    """The words [N, 4] after the rounds from `first_round` on; overwrites `even_2N`.

    Words live in the low halves of uint64, so that one multiplication gives both halves of a
    product. The odd words keep what is above them (the mask after the xor drops it).
    """
    high_2N = np.empty_like(even_2N)
    products = (np.empty_like(even_2N), np.empty_like(even_2N))
    for number in range(first_round, _ROUNDS):
        keys_21 = np.array(_round_key(key, number), dtype=np.uint64)[:, None]
        # Two buffers in turn: the last round's product is this round's odd words.
        product_2N = products[number % 2]
        np.multiply(even_2N, _MULTIPLIERS_21, out=product_2N)
        np.right_shift(product_2N, _WORD_BITS, out=high_2N)
        np.bitwise_xor(high_2N[::-1], odd_2N, out=even_2N)
        np.bitwise_xor(even_2N, keys_21, out=even_2N)
        np.bitwise_and(even_2N, _LOW_WORD_MASK, out=even_2N)
        odd_2N = product_2N[::-1]
    words_N4 = np.empty((even_2N.shape[1], LANES), dtype=np.uint32)
    words_N4[:, 0] = even_2N[0]
    words_N4[:, 1] = odd_2N[0]
    words_N4[:, 2] = even_2N[1]
    words_N4[:, 3] = odd_2N[1]
    return words_N4


def _round_key(key: Key, number: int) -> Key:
    return (
        (key[0] + number * _KEY_STEPS[0]) & _LOW_WORD,
        (key[1] + number * _KEY_STEPS[1]) & _LOW_WORD,
    )

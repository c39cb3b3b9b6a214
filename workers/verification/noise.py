"""Gumbel noise as a pure function of (seed, position, token id): Philox 4x32-10 in numpy.

Salmon, Moraes, Dror and Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). There is no
generator state, so there is nothing to save, restore, roll back or send.
"""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW_WORD = 0xFFFFFFFF
_LOW_WORD_MASK = np.uint64(_LOW_WORD)
_WORD_BITS = np.uint64(32)

LANES = 4
"""Tokens that share one counter."""


class Purpose(enum.IntEnum):
    """What noise is for: each purpose has numbers of its own."""

    COUPLED = 0
    """The target's own token, also at a position that had no candidate; a coupled draft."""
    ACCEPTANCE = 1
    """Whether a candidate is accepted."""
    RESIDUAL = 2
    """The token after all candidates of a position were refused."""
    DRAFTING = 3
    """A candidate that is not coupled."""


# x is a 32-bit word; v = (x + 0.5) / 2^32 lies in (0, 1). In float32 the largest x would round up
# to v = 1, whose exponential is infinite: the cap keeps v below 1 and all noise finite.
_LARGEST_V = np.float32(1 - 2.0**-24)

GUMBEL_SPAN = 26.0
"""More than the largest noise less the smallest: -log(2^-33) + log(24 log 2) = 25.7."""


def philox_4x32(counter_N4: NDArray[np.integer], key: tuple[int, int]) -> NDArray[np.uint32]:
    """Philox 4x32-10 of N counters of four 32-bit words under one key of two: words [N, 4]."""
    counter_4N = np.asarray(counter_N4).T.astype(np.uint64)
    return _philox(counter_4N[0::2], counter_4N[1::2], key)


def _philox(
    even_2N: NDArray[np.uint64], odd_2N: NDArray[np.uint64], key: tuple[int, int]
) -> NDArray[np.uint32]:
    """The counter's words 0 and 2 (overwritten), and 1 and 3 (N may be 1 there: broadcast).

    Words live in the low halves of uint64, so that one multiplication gives both halves of a
    product. The odd words keep what is above them (the masks after the xor drop it).
    """
    high_2N = np.empty_like(even_2N)
    products = (np.empty_like(even_2N), np.empty_like(even_2N))
    keys_21 = np.empty((2, 1), dtype=np.uint64)
    for number in range(_ROUNDS):
        for half in (0, 1):
            keys_21[half, 0] = (key[half] + number * _KEY_STEPS[half]) & _LOW_WORD
        # Two buffers in turn: the last round's product is this round's odd words.
        product_2N = products[number % 2]
        np.multiply(even_2N, _MULTIPLIERS, out=product_2N)
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


def _words_of_counters(
    first_N: NDArray[np.integer],
    seed: int,
    position: int | NDArray[np.int64],
    sample_index: int,
    purpose: int,
    candidate: int | NDArray[np.int64],
) -> NDArray[np.uint32]:
    """Words [N, 4] of the counters (first_N, position, purpose + 256 candidate, sample index).

    Position and candidate are one for all counters, or [N].
    """
    assert 0 <= seed < 2**64, f"a seed is an unsigned 64-bit number, got {seed}"
    assert 0 <= purpose < 256, f"a purpose is a byte, got {purpose}"
    even_2N = np.empty((2, first_N.size), dtype=np.uint64)
    even_2N[0] = first_N
    even_2N[1] = purpose + 256 * candidate
    odd_2N = np.empty((2, np.size(position)), dtype=np.uint64)
    odd_2N[0] = position
    odd_2N[1] = sample_index
    return _philox(even_2N, odd_2N, (seed & _LOW_WORD, seed >> 32))


def _gumbel(words_N: NDArray[np.uint32]) -> NDArray[np.float32]:
    """-log(E) of the exponential E = -log1p(-v), v = (x + 0.5) / 2^32, all in float32."""
    noise_N = words_N.astype(np.float32)
    noise_N += np.float32(0.5)
    noise_N *= np.float32(2.0**-32)
    np.minimum(noise_N, _LARGEST_V, out=noise_N)
    np.negative(noise_N, out=noise_N)
    np.log1p(noise_N, out=noise_N)
    np.negative(noise_N, out=noise_N)
    np.log(noise_N, out=noise_N)
    return np.negative(noise_N, out=noise_N)


def gumbel_noise_V(
    *,
    seed: int,
    position: int,
    vocab_size: int,
    sample_index: int = 0,
    purpose: int = 0,
    candidate: int = 0,
) -> NDArray[np.float32]:
    """Gumbel noise [V] of every token at one position: bit-equal whenever the arguments are.

    `purpose` is a Purpose (ALGORITHMS.md section 2); `candidate` keeps several draws apart.
    """
    counters = np.arange(-(-vocab_size // LANES), dtype=np.uint64)
    words_N4 = _words_of_counters(counters, seed, position, sample_index, purpose, candidate)
    return _gumbel(words_N4.reshape(-1)[:vocab_size])


def gumbel_noise_of(
    token_ids_N: NDArray[np.int64],
    *,
    seed: int,
    position: int,
    sample_index: int = 0,
    purpose: int = 0,
    candidate: int = 0,
) -> NDArray[np.float32]:
    """The values [N] that gumbel_noise_V has at these token ids; cheaper where N is below V / 4."""
    words_N4 = _words_of_counters(
        token_ids_N // LANES, seed, position, sample_index, purpose, candidate
    )
    return _gumbel(words_N4[np.arange(token_ids_N.size), token_ids_N % LANES])


def uniforms_N(
    positions_N: NDArray[np.int64],
    candidates_N: NDArray[np.int64],
    *,
    seed: int,
    purpose: int,
    sample_index: int = 0,
) -> NDArray[np.float64]:
    """A number in (0, 1) for each pair of position and candidate number: token id 0's v."""
    first_N = np.zeros(positions_N.size, dtype=np.uint64)
    words_N4 = _words_of_counters(first_N, seed, positions_N, sample_index, purpose, candidates_N)
    return (words_N4[:, 0].astype(np.float64) + 0.5) * 2.0**-32

"""Gumbel noise as a pure function of (seed, position, token id), from Philox words.

Philox 4x32-10: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC
2011). There is no generator state, so there is nothing to save, restore, roll back or send. numpy
makes a hundred thousand words in a fraction of a millisecond, and takes a third of torch's time for
the same logarithms on a CPU.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

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
    costs less. All rows share the products of the first round. One of the two products of the
    second round is the same for all counters of a row. Rows with few counters share calls.
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
    """Overwrite the even words. The new odd words are the products, in reversed order.

    A word is the low half of a uint64, so one multiplication gives both halves of a product. The
    odd words keep their high halves, and the mask after the xor removes them.
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


class Purpose(enum.IntEnum):
    """What noise is used for. Each purpose has random numbers of its own."""

    COUPLED = 0
    """The target's own token, also at a position without candidates; a coupled draft."""
    ACCEPTANCE = 1
    """Whether a candidate is accepted."""
    RESIDUAL = 2
    """The token after all candidates of a position were refused."""
    DRAFTING = 3
    """A candidate that is not coupled."""


@dataclass(frozen=True, slots=True)
class Stream:
    """All that the random numbers depend on, besides the token id.

    `purpose` is a Purpose; `candidate` distinguishes several draws for one position.
    """

    seed: int
    position: int
    sample_index: int = 0
    purpose: int = Purpose.COUPLED
    candidate: int = 0

    @property
    def counter(self) -> tuple[int, int, int]:
        """The counter's words after the first."""
        return self.position, _purpose_word(self.purpose, self.candidate), self.sample_index


# x is a 32-bit word; v = (x + 0.5) / 2^32 is in (0, 1). In float32 the largest x would be rounded
# to v = 1, whose exponential is infinite. The cap keeps v below 1 and all noise finite.
_LARGEST_V = np.float32(1 - 2.0**-24)

GUMBEL_SPAN = 26.0
"""More than the largest noise minus the smallest: -log(2^-33) + log(24 log 2) = 25.7."""


def gumbel(words_N: NDArray[np.uint32]) -> NDArray[np.float32]:
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


# A bound on a token's score without logarithms. Let `bits` be the bits of float32(x), read as an
# integer. Then log weight + bits * _NATS_PER_BIT is at least the score minus _CEILING: `bits` is
# 2^23 (127 + a linear interpolation of log2 x, which is never above it), and E = -log1p(-v) is at
# least v.
_NATS_PER_BIT = np.float32(-math.log(2) * 2.0**-23)
_CEILING = math.log(2) * (127 + 32)
_SLACK = 0.01
"""More than all float32 rounding in such a bound, in the noise and in scores."""


def best_scores(
    log_weights_N: NDArray[np.float32], words_N: NDArray[np.uint32]
) -> NDArray[np.int64]:
    """Ascending indices that include every maximum of log weights + gumbel(words).

    The result has few of the tokens, and takes the logarithm of one only: it has those whose bound
    on the score is not below the score of the token with the largest bound.
    """
    bounds_N = words_N.astype(np.float32).view(np.int32).astype(np.float32)
    bounds_N *= _NATS_PER_BIT
    bounds_N += log_weights_N
    likely = int(bounds_N.argmax())
    score = float(log_weights_N[likely]) + float(gumbel(words_N[likely : likely + 1])[0])
    return np.flatnonzero(bounds_N >= np.float32(score - _CEILING - _SLACK))


def words_of_all(streams: Sequence[Stream], vocab_size: int) -> NDArray[np.uint32]:
    """The words [A, V] of every token, one row per stream; bit-equal in every call."""
    keys = [key_of_seed(stream.seed) for stream in streams]
    rests = [stream.counter for stream in streams]
    words_AN4 = words_of_ranges(-(-vocab_size // LANES), rests, keys)
    return words_AN4.reshape(len(streams), -1)[:, :vocab_size]


def words_of(stream: Stream, token_ids_N: NDArray[np.int64]) -> NDArray[np.uint32]:
    """The words [N] that words_of_all has at these token ids; cheaper if N is below V / 4."""
    counters_4N = np.empty((LANES, token_ids_N.size), dtype=np.uint64)
    counters_4N[0] = token_ids_N // LANES
    counters_4N[1:] = np.array(stream.counter, dtype=np.uint64)[:, None]
    words_N4 = words_of_counters(counters_4N, key_of_seed(stream.seed))
    return words_N4[np.arange(token_ids_N.size), token_ids_N % LANES]


def uniforms_N(
    positions_N: NDArray[np.int64],
    candidates_N: NDArray[np.int64],
    *,
    seed: int,
    purpose: int,
    sample_index: int = 0,
) -> NDArray[np.float64]:
    """A number in (0, 1) for each pair of position and candidate number: `v` for token id 0."""
    counters_4N = np.zeros((LANES, positions_N.size), dtype=np.uint64)
    counters_4N[1] = positions_N
    counters_4N[2] = _purpose_word(purpose, candidates_N)
    counters_4N[3] = sample_index
    words_N4 = words_of_counters(counters_4N, key_of_seed(seed))
    return (words_N4[:, 0].astype(np.float64) + 0.5) * 2.0**-32


_Number = TypeVar("_Number", int, NDArray[np.int64])


def _purpose_word(purpose: int, candidate: _Number) -> _Number:
    assert 0 <= purpose < 256, f"a purpose is a byte, got {purpose}"
    return purpose + 256 * candidate

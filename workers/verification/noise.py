"""Gumbel noise as a pure function of (seed, position, token id), from Philox words.

It uses numpy, which takes a third of torch's time for the same logarithms on a CPU.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from workers.verification.philox import LANES, key_of_seed, words_of_counters, words_of_ranges


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
"""Above the largest noise minus the smallest: -log(2^-33) + log(24 log 2) = 25.7."""


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


# If this multiple of float32(x)'s bits, read as an integer, is added to a logit, the sum is at
# least its score minus _CEILING: the bits are 2^23 (127 + an interpolation of log2 x from below),
# and E = -log1p(-v) is at least v.
_NATS_PER_BIT = np.float32(-math.log(2) * 2.0**-23)
_CEILING = math.log(2) * (127 + 32)
_SLACK = 0.01
"""Above all float32 rounding in such a sum, in the noise and in scores."""


def best_scores(
    log_weights_N: NDArray[np.float32], words_N: NDArray[np.uint32]
) -> NDArray[np.int64]:
    """Ascending indices that include every maximum of log weights + gumbel(words).

    They are a few of many, found without logarithms: those whose bound on the score is not below
    the score of the token with the largest bound.
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


def words_V(stream: Stream, vocab_size: int) -> NDArray[np.uint32]:
    """The words [V] of one stream."""
    return words_of_all([stream], vocab_size).reshape(-1)


def words_of(stream: Stream, token_ids_N: NDArray[np.int64]) -> NDArray[np.uint32]:
    """The words [N] that words_V has at these token ids; cheaper if N is below V / 4."""
    counters_4N = np.empty((LANES, token_ids_N.size), dtype=np.uint64)
    counters_4N[0] = token_ids_N // LANES
    counters_4N[1:] = np.array(stream.counter, dtype=np.uint64)[:, None]
    words_N4 = words_of_counters(counters_4N, key_of_seed(stream.seed))
    return words_N4[np.arange(token_ids_N.size), token_ids_N % LANES]


def words_of_part(stream: Stream, token_ids: range) -> NDArray[np.uint32]:
    """The words that words_V has at a run of token ids that begins at a multiple of 4."""
    assert token_ids.start % LANES == 0, token_ids
    assert token_ids.step == 1, token_ids
    firsts = np.arange(token_ids.start // LANES, -(-token_ids.stop // LANES), dtype=np.uint64)
    counters_4N = np.empty((LANES, firsts.size), dtype=np.uint64)
    counters_4N[0] = firsts
    counters_4N[1:] = np.array(stream.counter, dtype=np.uint64)[:, None]
    words_N4 = words_of_counters(counters_4N, key_of_seed(stream.seed))
    return words_N4.reshape(-1)[: len(token_ids)]


def gumbel_noise_V(
    *,
    seed: int,
    position: int,
    vocab_size: int,
    sample_index: int = 0,
    purpose: int = 0,
    candidate: int = 0,
) -> NDArray[np.float32]:
    """Gumbel noise [V] of every token at one position; bit-equal for equal arguments."""
    stream = Stream(seed, position, sample_index, purpose, candidate)
    return gumbel(words_V(stream, vocab_size))


def gumbel_noise_of(
    token_ids_N: NDArray[np.int64],
    *,
    seed: int,
    position: int,
    sample_index: int = 0,
    purpose: int = 0,
    candidate: int = 0,
) -> NDArray[np.float32]:
    """The values [N] that gumbel_noise_V has at these token ids; cheaper if N is below V / 4."""
    return gumbel(words_of(Stream(seed, position, sample_index, purpose, candidate), token_ids_N))


def uniforms_N(
    positions_N: NDArray[np.int64],
    candidates_N: NDArray[np.int64],
    *,
    seed: int,
    purpose: int,
    sample_index: int = 0,
) -> NDArray[np.float64]:
    """A number in (0, 1) for each pair of position and candidate number: the v of token id 0."""
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

"""The noise in the forms in which tests compare it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from workers.verification.noise import (
    Key,
    Stream,
    gumbel,
    words_of,
    words_of_all,
    words_of_counters,
)


def philox_4x32(counter_N4: NDArray[np.integer], key: Key) -> NDArray[np.uint32]:
    """The words [N, 4] of N counters of four 32-bit words under one key."""
    return words_of_counters(np.asarray(counter_N4).T.astype(np.uint64), key)


def words_V(stream: Stream, vocab_size: int) -> NDArray[np.uint32]:
    """The words [V] of one stream."""
    return words_of_all([stream], vocab_size).reshape(-1)


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
    """The values [N] that gumbel_noise_V has at these token ids."""
    return gumbel(words_of(Stream(seed, position, sample_index, purpose, candidate), token_ids_N))

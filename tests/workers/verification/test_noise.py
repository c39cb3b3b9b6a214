"""The noise: the right integers, the right counters, the right law."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.verification.chi_square import follows
from tests.workers.verification.reference_noise import (
    gumbel_noise_of,
    gumbel_noise_V,
    philox_4x32,
    words_V,
)
from workers.verification import noise
from workers.verification.noise import (
    GUMBEL_SPAN,
    Stream,
    best_scores,
    gumbel,
    words_of_ranges,
)

ONES = 2**32 - 1
_word = st.integers(0, ONES)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_published_vectors(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    """Random123's known answers, alone and among other counters."""
    assert tuple(philox_4x32(np.array([counter]), key)[0]) == words
    among = np.array([(1, 2, 3, 4), counter, (5, 6, 7, 8)], dtype=np.uint64)
    assert tuple(philox_4x32(among, key)[1]) == words


@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(1, 60),
    rows=st.lists(
        st.tuples(st.tuples(_word, _word, _word), st.tuples(_word, _word)), min_size=1, max_size=5
    ),
    block=st.integers(1, 150),
)
def test_ranges_of_counters_have_the_words_of_their_counters(
    size: int, rows: list[tuple[tuple[int, int, int], tuple[int, int]]], block: int
) -> None:
    """The shortened first rounds equal the algorithm's for any division of rows into blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "_BLOCK", block)
        found = words_of_ranges(size, [rest for rest, _ in rows], [key for _, key in rows])
        for words_N4, (rest, key) in zip(found, rows, strict=True):
            counter_N4 = np.array([(first, *rest) for first in range(size)], dtype=np.uint64)
            assert np.array_equal(words_N4, philox_4x32(counter_N4, key))


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(
        st.tuples(
            st.one_of(st.floats(-60, 0, width=32), st.sampled_from([0.0, -3e38, -math.inf])),
            st.one_of(_word, st.sampled_from([0, 1, 2**31, ONES - 127, ONES])),
        ),
        min_size=1,
        max_size=30,
    ),
    likeliest=st.integers(0, 29),
)
def test_no_largest_score_is_missed(tokens: list[tuple[float, int]], likeliest: int) -> None:
    """Also with ties, masked tokens, and at both ends of the noise."""
    log_weights_N = np.array([log for log, _ in tokens], dtype=np.float32)
    log_weights_N[likeliest % len(tokens)] = 0.0
    words_N = np.array([word for _, word in tokens], dtype=np.uint32)
    scores_N = log_weights_N + gumbel(words_N)
    found = best_scores(log_weights_N, words_N)
    assert set(np.flatnonzero(scores_N == scores_N.max())) <= set(found.tolist())
    assert (np.diff(found) > 0).all()


def test_few_scores_are_left() -> None:
    """At most 3 of 50,000 tokens with a flat law, over 20 positions."""
    for position in range(20):
        words = words_V(Stream(3, position), 50_000)
        assert best_scores(np.zeros(50_000, dtype=np.float32), words).size <= 3


@pytest.mark.parametrize("purpose", [0, 3])
@pytest.mark.parametrize("candidate", [0, 5])
def test_key_and_counter_are_those_of_the_document(purpose: int, candidate: int) -> None:
    """Key: the seed, low word first.

    Counter: token id // 4, position, purpose + 256 candidate, sample index.
    """
    seed, position, sample_index, vocab_size = 0xFEDCBA9876543210, 70_001, 9, 11
    noise_V = gumbel_noise_V(
        seed=seed,
        position=position,
        vocab_size=vocab_size,
        sample_index=sample_index,
        purpose=purpose,
        candidate=candidate,
    )
    assert noise_V.dtype == np.float32
    assert noise_V.shape == (vocab_size,)
    for token_id in range(vocab_size):
        counter = np.array([[token_id // 4, position, purpose + 256 * candidate, sample_index]])
        word = int(philox_4x32(counter, (0x76543210, 0xFEDCBA98))[0, token_id % 4])
        exponential = -math.log1p(-(word + 0.5) / 2**32)
        assert noise_V[token_id] == pytest.approx(-math.log(exponential), abs=2e-6)


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 1001, 49_152])
def test_a_token_has_the_same_bits_however_it_is_computed(vocab_size: int) -> None:
    """Computed alone, with a few others, or with the whole of a smaller or larger vocabulary."""
    arguments = {"seed": 2**63 + 5, "position": 17, "sample_index": 2}
    noise_V = gumbel_noise_V(vocab_size=vocab_size, **arguments)
    larger_V = gumbel_noise_V(vocab_size=vocab_size + 777, **arguments)
    assert np.array_equal(larger_V[:vocab_size], noise_V)
    rng = np.random.default_rng(1)
    for size in {1, 2, 15, 16, 17, 1000}:
        ids = np.sort(rng.integers(0, vocab_size, size))
        assert np.array_equal(gumbel_noise_of(ids, **arguments), noise_V[ids])


def test_noise_is_finite_at_both_ends() -> None:
    """Also where (x + 0.5) / 2^32 would round to 1. The span covers the extremes."""
    ends = gumbel(np.array([0, 1, 2**31, ONES - 1, ONES], dtype=np.uint32))
    assert np.isfinite(ends).all()
    assert (np.diff(ends) <= 0).all()
    assert GUMBEL_SPAN - 1 < ends[0] - ends[-1] < GUMBEL_SPAN - 0.1


def test_noise_isgumbel() -> None:
    """2^19 values in 64 bins of equal probability. A shift of 0.02 is noticed."""
    noise = np.concatenate(
        [gumbel_noise_V(seed=7, position=p, vocab_size=2**16) for p in range(8)]
    ).astype(np.float64)

    def fits(values: np.ndarray) -> bool:
        quantiles = np.exp(-np.exp(-values))  # the Gumbel distribution function
        counts = np.bincount((quantiles * 64).astype(np.int64), minlength=64)
        return follows(counts, np.full(64, 1 / 64))

    assert fits(noise)
    assert not fits(noise + 0.02)


PROBS = np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.04])


def _draws(arguments: list[dict[str, int]]) -> np.ndarray:
    logs = np.log(PROBS)
    return np.array(
        [int((logs + gumbel_noise_V(vocab_size=len(PROBS), **each)).argmax()) for each in arguments]
    )


def _pairs_follow(draws: np.ndarray) -> bool:
    """Whether consecutive draws follow PROBS and are independent: 36 cells."""
    pairs = draws.reshape(-1, 2)
    counts = np.bincount(pairs[:, 0] * 6 + pairs[:, 1], minlength=36)
    return follows(counts, np.outer(PROBS, PROBS).ravel())


@pytest.mark.parametrize("varied", ["position", "seed", "sample_index", "candidate"])
def test_gumbel_max_draws_follow_the_probabilities_and_are_independent(varied: str) -> None:
    """The draws differ in one argument. The rarest pair is expected 0.0016 * 4,000 = 6.4 times."""
    fixed = {"position": 3, "seed": 11}
    assert _pairs_follow(_draws([fixed | {varied: i} for i in range(8_000)]))


def test_reused_noise_is_noticed() -> None:
    """Negative control: noise used at two positions fits singly, but not in pairs."""
    draws = _draws([{"position": i // 2, "seed": 11} for i in range(8_000)])
    assert follows(np.bincount(draws[::2], minlength=6), PROBS)
    assert not _pairs_follow(draws)

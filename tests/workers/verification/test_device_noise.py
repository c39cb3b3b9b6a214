"""The noise in torch is numpy's: the same integers, and floats that differ at most by rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.verification.device_noise import gumbel_noise_RV, philox_words
from workers.verification.noise import gumbel_noise_V
from workers.verification.philox import key_of_seed, philox_4x32

WORD = st.integers(0, 2**32 - 1)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_known_answers(device: str) -> None:
    """The published vectors of Random123 (kat_vectors), as test_noise.py has them."""
    ones = 0xFFFFFFFF
    cases = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, (ones,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ]
    for counter, key, expected in cases:
        words = philox_words(
            torch.tensor(counter[0::2], device=device)[:, None, None],
            torch.tensor(counter[1::2], device=device)[:, None, None],
            torch.tensor(key, device=device)[:, None, None],
        )
        assert tuple(words[0, 0].tolist()) == expected


@settings(max_examples=200)
@given(st.lists(st.tuples(WORD, WORD, WORD, WORD), min_size=1, max_size=4), WORD, WORD)
def test_words_are_those_of_numpy(
    counters: list[tuple[int, int, int, int]], low: int, high: int
) -> None:
    expected = philox_4x32(np.array(counters, dtype=np.uint64), (low, high))
    counter_N4 = torch.tensor(counters)
    words_RN4 = philox_words(
        counter_N4[:, 0::2].T[:, :, None],
        counter_N4[:, 1::2].T[:, :, None],
        torch.tensor([low, high])[:, None, None],
    )
    assert words_RN4[:, 0].tolist() == expected.tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_noise_of_several_rows(device: str) -> None:
    seeds, positions, samples = [0, 7, 2**64 - 1], [5, 0, 70_000], [0, 3, 1]
    noise_RV = gumbel_noise_RV(
        torch.tensor([key_of_seed(seed) for seed in seeds], device=device).T,
        torch.tensor(positions, device=device),
        torch.tensor(samples, device=device),
        vocab_size=1003,
    ).cpu()
    for row, (seed, position, sample) in enumerate(zip(seeds, positions, samples, strict=True)):
        expected_V = gumbel_noise_V(
            seed=seed, position=position, sample_index=sample, vocab_size=1003
        )
        # Rounding of two logarithms: where -log(E) is near 0, it is that of values near 1.
        np.testing.assert_allclose(noise_RV[row].numpy(), expected_V, rtol=2e-6, atol=5e-7)


def test_noise_is_finite_at_both_ends() -> None:
    """The words 0 and 2^32 - 1 give the largest and smallest possible noise."""
    words_RN4 = torch.tensor([0, 0xFFFFFFFF])
    ends = words_RN4.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_max_(1 - 2.0**-24)
    assert torch.isfinite(-torch.log(-torch.log1p(-ends))).all()

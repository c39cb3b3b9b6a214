"""The choice of tokens on a device: its noise, and the one copy of what rows are sampled with."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.sampling import SamplingParams, SequenceSpec
from tests.workers.verification.reference_noise import gumbel_noise_V, philox_4x32
from workers.verification.device_choice import (
    Row,
    gumbel_noise_RV,
    needs_room,
    pack_rows,
    philox_words,
)
from workers.verification.noise import key_of_seed

VOCAB = 97
PLAIN = SamplingParams()
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1e-40, top_p=0.9),
    SamplingParams(temperature=1e39, min_p=0.25),
]


def test_each_row_has_its_own_values() -> None:
    """Two rows of the second sequence are apart, and one of them has a path."""
    specs = [
        SequenceSpec(sampling, seed=2**64 - 1 - index, prompt_length=1, sample_index=index)
        for index, sampling in enumerate(SAMPLINGS)
    ]
    order = [1, 0, 2, 3, 1]
    rows = [Row(specs[index], [3] * (place + 1), (4,)) for place, index in enumerate(order)]
    params = pack_rows(rows, vocab_size=VOCAB, device=torch.device("cpu"))
    tiny = float(np.finfo(np.float32).tiny)
    expected = {0: 1.0, 1: float(np.float32(0.7)), 2: tiny, 3: math.inf}
    assert params.greedy_R.tolist() == [index == 0 for index in order]
    assert params.temperature_R.tolist() == [expected[index] for index in order]
    assert params.top_k_R.tolist() == [5 if index == 1 else VOCAB for index in order]
    assert params.top_p_R.tolist() == [0.9 if index == 2 else 1.0 for index in order]
    cut = float(np.float32(math.log(0.25)))
    assert params.log_min_p_R.tolist() == [cut if index == 3 else -math.inf for index in order]
    assert params.keys_2R.tolist() == [[2**32 - 1 - index for index in order], [2**32 - 1] * 5]
    assert params.positions_R.tolist() == [2, 3, 4, 5, 6]
    assert params.sample_indices_R.tolist() == order
    assert (params.draws, params.filters, params.adjustments) == (True, True, None)


def test_all_values_are_views_of_one_copy() -> None:
    rows = [Row(SequenceSpec(sampling, 1, 1), [3]) for sampling in SAMPLINGS]
    params = pack_rows(rows, vocab_size=VOCAB, device=torch.device("cpu"))
    values = [getattr(params, field.name) for field in fields(params)]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    assert len(tensors) == 8
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1


def test_what_takes_room() -> None:
    def needs(*samplings: SamplingParams) -> bool:
        rows = [Row(SequenceSpec(sampling, 1, 1), [3]) for sampling in samplings]
        return needs_room(rows, VOCAB)

    assert not needs(PLAIN, SamplingParams(temperature=0.0, top_k=3), SamplingParams(top_k=VOCAB))
    for one in (
        SamplingParams(top_k=VOCAB - 1),
        SamplingParams(top_p=0.9),
        SamplingParams(min_p=0.1),
        SamplingParams(logit_bias={3: 1.0}),
        SamplingParams(repetition_penalty=1.1, temperature=0.0),
        SamplingParams(min_tokens=1),
    ):
        assert needs(PLAIN, one)
    assert needs_room([Row(SequenceSpec(PLAIN, 1, 1, bad_words=((3,),)), [3])], VOCAB)


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

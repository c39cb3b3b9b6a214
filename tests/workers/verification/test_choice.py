"""A row's token from the best of each part of the vocabulary is that of the whole row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.sampling import SamplingParams, SequenceSpec
from workers.engine.parallel.cuts import vocabulary_part
from workers.verification.choice import best_score, choose_token, parts_suffice

ROWS = 50
PREFIX = [1, 2, 3]


def from_parts(logits_V: torch.Tensor, spec: SequenceSpec, degree: int, *, noise_of: int) -> int:
    """`noise_of`: the position whose noise is used; that of the row is len(PREFIX)."""
    values_V = logits_V.numpy()
    found = []
    for rank in range(degree):
        part = vocabulary_part(values_V.size, degree=degree, rank=rank)
        if part:
            part_N = values_V[part.start : part.stop]
            found.append(best_score(part_N, values_V.max(), part, spec, noise_of))
    return max(found, key=lambda one: one[0])[1]


@pytest.mark.parametrize("vocab_size", [7, 302, 30_000])
@pytest.mark.parametrize("temperature", [0.05, 1.0, 3.0])
@pytest.mark.parametrize("degree", [2, 3, 5])
def test_the_token_is_that_of_the_whole_row(
    vocab_size: int, temperature: float, degree: int
) -> None:
    """The other position's noise, which must give other tokens, shows that the noise matters."""
    generator = torch.Generator().manual_seed(degree)
    same = same_with_other_noise = 0
    for seed in range(ROWS):
        logits_V = 4 * torch.randn(vocab_size, generator=generator)
        spec = SequenceSpec(SamplingParams(temperature=temperature), seed=seed, prompt_length=3)
        expected = choose_token(logits_V, spec, PREFIX)
        position = len(PREFIX)
        same += from_parts(logits_V, spec, degree, noise_of=position) == expected
        other = from_parts(logits_V, spec, degree, noise_of=position + 1)
        same_with_other_noise += other == expected
    assert same == ROWS
    if temperature >= 1.0:
        assert same_with_other_noise < ROWS


def test_the_smallest_temperature_draws_among_the_largest() -> None:
    spec = SequenceSpec(SamplingParams(temperature=1e-30), seed=1, prompt_length=0)
    part_N = np.array([1.0, 5.0, 5.0, 0.0], dtype=np.float32)
    score, token_id = best_score(part_N, np.float32(5.0), range(8, 12), spec, 0)
    whole = torch.cat([torch.zeros(8), torch.from_numpy(part_N)])
    assert token_id == choose_token(whole, spec, [])
    assert np.isfinite(score)


@pytest.mark.parametrize(
    ("sampling", "rule", "suffice"),
    [
        (SamplingParams(temperature=0.0), "coupled", True),
        (SamplingParams(temperature=0.0, top_k=5), "coupled", True),
        (SamplingParams(temperature=1.0), "coupled", True),
        (SamplingParams(temperature=1.0, top_k=5), "coupled", False),
        (SamplingParams(temperature=1.0, top_p=0.9), "coupled", False),
        (SamplingParams(temperature=1.0, min_p=0.1), "coupled", False),
        (SamplingParams(temperature=0.0, repetition_penalty=1.1), "coupled", False),
        (SamplingParams(temperature=1.0), "rejection", False),
    ],
)
def test_what_looks_at_the_whole_row_is_not_done_by_parts(
    sampling: SamplingParams, rule: str, suffice: bool
) -> None:
    assert parts_suffice(SequenceSpec(sampling, seed=1, prompt_length=0, rule=rule)) is suffice

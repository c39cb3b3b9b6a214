"""Parameters of rows reach the device in one copy, with each row's values in its place."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import torch

from paceline.sampling import SamplingParams, SequenceSpec
from workers.verification.row_params import Row, needs_room, pack_rows

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

"""Launches of the kernels that choose tokens, for compiling.py: nothing is run."""

from __future__ import annotations

import torch

from paceline.sampling import SamplingParams, SequenceSpec
from workers.verification.choice_kernels import choose_by_kernels
from workers.verification.device_choice import Row, pack_rows

VOCAB = 128_256


def launch_choices() -> None:
    """Of several numbers of rows, and samplings that lead to all kernels."""
    for count in (1, 2, 3, 16):
        for sampling in (
            SamplingParams(temperature=0.0),
            SamplingParams(),
            SamplingParams(top_p=0.9),
        ):
            rows = [Row(SequenceSpec(sampling, 1, 1), [1])] * count
            params = pack_rows(rows, vocab_size=VOCAB, device=torch.device("cpu"))
            choose_by_kernels(torch.zeros(count, VOCAB), params)

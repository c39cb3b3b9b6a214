"""Prompts of several blocks."""

from __future__ import annotations

from random import Random

from paceline.sampling import SamplingParams, SequenceSpec
from tests.workers.drafting.mirror import VOCAB_SIZE

MAX_LEN = 512
SIZE = 128
"""Tokens of a block."""


def tokens(random: Random, count: int) -> list[int]:
    return [random.randrange(VOCAB_SIZE) for _ in range(count)]


def spec(length: int, rule: str = "coupled") -> SequenceSpec:
    return SequenceSpec(SamplingParams(), seed=5, prompt_length=length, rule=rule)

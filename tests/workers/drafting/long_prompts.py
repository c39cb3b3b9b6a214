"""Prompts of several blocks."""

from __future__ import annotations

from random import Random

from paceline.sampling import SamplingParams, SequenceSpec
from tests.workers.drafting.mirror import VOCAB_SIZE
from workers.drafting.desk import DraftingDesk
from workers.drafting.kinds.model.proposer import ModelProposer
from workers.drafting.kinds.model.tree_kv import TreeKv
from workers.drafting.tree import DraftTree

MAX_LEN = 512
SIZE = 128
"""Tokens in a block."""


def tokens(random: Random, count: int) -> list[int]:
    return [random.randrange(VOCAB_SIZE) for _ in range(count)]


def kv_of(desk: DraftingDesk) -> dict[DraftTree, TreeKv]:
    """The KV of each sequence of a model drafter."""
    assert isinstance(desk.proposer, ModelProposer)
    return {tree: held.kv for tree, held in desk.proposer._held.items()}


def spec(length: int, rule: str = "coupled") -> SequenceSpec:
    return SequenceSpec(SamplingParams(), seed=5, prompt_length=length, rule=rule)

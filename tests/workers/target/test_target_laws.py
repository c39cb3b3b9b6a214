"""Rules that toss coins, through a real shard: the law of the first two tokens is the target's.

A bias leaves a real checkpoint with three tokens, so all pairs can be enumerated. Each run of a
rule draws NUM_SEEDS pairs, with fixed seeds. The bound is wrongly exceeded once in a million.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.sampling import SamplingParams, SequenceSpec
from paceline.v1 import target_pb2
from paceline.wire.sequences import spec_to_wire
from tests.workers.grpc_peers import Stepper, open_channel
from tests.workers.verification import chi_square
from tests.workers.verification.drafters import DRAFTERS, Drafted, pretends_to_be_uniform
from tests.workers.verification.table_model import TableModel
from workers.drafting.wire import distributions_to_wire
from workers.engine.cpu.engine import CpuEngine
from workers.engine.slices import Slice
from workers.process.server import RunningServer
from workers.target.shard import TargetShardOptions, serve_target_shard
from workers.verification.candidates import CandidateTree
from workers.verification.rule import RULES

pytestmark = pytest.mark.long

PROMPT = [5, 6, 7, 8, 5]
NUM_TOKENS = 3
NUM_SEEDS = 1200
BATCH = 40
SAMPLING = SamplingParams(temperature=1.5, logit_bias=dict.fromkeys(range(NUM_TOKENS), 200.0))
KV_BYTES = (
    BATCH * 2 * 2 * 2 * 128 * 8 * 4
)  # layers, keys and values, heads, positions, size, float32
DRAFT_MODEL = TableModel(NUM_TOKENS, seed=4)


@pytest.fixture(scope="module")
def law(checkpoint: Path) -> NDArray[np.float64]:
    """The probability of each pair, by the target's logits and a softmax written out here."""
    engine = CpuEngine(checkpoint, threads=1, kv_memory_bytes=KV_BYTES)

    def next_token(tokens: list[int]) -> NDArray[np.float64]:
        (logits_V,) = engine.step([Slice((0,), 0, tokens, 1)])
        scaled = torch.softmax(logits_V[:NUM_TOKENS].double() / SAMPLING.temperature, dim=0)
        return scaled.numpy()

    first = next_token(PROMPT)
    pairs = [first[token] * next_token([*PROMPT, token]) for token in range(NUM_TOKENS)]
    return np.concatenate(pairs)


@pytest.fixture
async def shard(checkpoint: Path) -> AsyncIterator[RunningServer]:
    options = TargetShardOptions(checkpoint, threads=1, kv_memory_bytes=KV_BYTES)
    server = await serve_target_shard(options, host="127.0.0.1")
    yield server
    await server.stop()


Draft = Callable[[SequenceSpec], Drafted]


async def count_pairs(shard: RunningServer, rule: str, draft: Draft) -> NDArray[np.int64]:
    """The number of each pair of first tokens, over NUM_SEEDS seeds."""
    counts = np.zeros(NUM_TOKENS**2, dtype=np.int64)
    async with open_channel(shard.address) as channel:
        stepper = Stepper(channel)
        for begin in range(0, NUM_SEEDS, BATCH):
            specs = [
                SequenceSpec(SAMPLING, seed=seed, prompt_length=len(PROMPT), rule=rule)
                for seed in range(begin, begin + BATCH)
            ]
            for first, second in await decode_pairs(stepper, specs, draft):
                counts[first * NUM_TOKENS + second] += 1
        await stepper.end()
    return counts


async def decode_pairs(
    stepper: Stepper, specs: list[SequenceSpec], draft: Draft
) -> list[list[int]]:
    """The first two tokens of a sequence for each spec, all in the same steps."""
    drafted = [draft(spec) for spec in specs]
    answer = await stepper.send(
        open=[
            target_pb2.TargetSequence(sequence_id=index, spec=spec_to_wire(spec))
            for index, spec in enumerate(specs)
        ],
        slices=[prompt_and_window(index, one) for index, one in enumerate(drafted)],
    )
    texts = [
        [*tree.tokens_of(verdict.accepted), verdict.token_id]
        for verdict, (tree, _) in zip(answer.verdicts, drafted, strict=True)
    ]
    short = [index for index, text in enumerate(texts) if len(text) < 2]
    answer = await stepper.send(
        slices=[
            target_pb2.Slice(
                sequence_id=index, start=len(PROMPT), token_ids=texts[index], verdict=True
            )
            for index in short
        ]
    )
    for index, verdict in zip(short, answer.verdicts, strict=True):
        texts[index].append(verdict.token_id)
    await stepper.send(close=range(len(specs)))
    return [text[:2] for text in texts]


def prompt_and_window(index: int, drafted: Drafted) -> target_pb2.Slice:
    """The whole prompt and the candidates after it, in one slice."""
    tree, draft_probs = drafted
    return target_pb2.Slice(
        sequence_id=index,
        token_ids=[*PROMPT, *tree.token_ids],
        window=len(tree),
        verdict=True,
        new_blocks=[index],
        parents=tree.parents,
        multiplicities=tree.multiplicities,
        distributions=distributions_to_wire(draft_probs.of_node if draft_probs else {}),
    )


@pytest.mark.parametrize("rule", list(RULES))
async def test_the_law_is_the_targets(
    shard: RunningServer, law: NDArray[np.float64], rule: str
) -> None:
    seen: set[CandidateTree] = set()

    def draft(spec: SequenceSpec) -> Drafted:
        drafted = DRAFTERS[rule](DRAFT_MODEL, spec, PROMPT)
        seen.add(drafted[0])
        return drafted

    counts = await count_pairs(shard, rule, draft)
    assert chi_square.follows(counts, law)
    if rule != "one-hot":
        assert len(seen) > 3


@pytest.mark.parametrize("rule", ["rejection", "kseq", "recursive", "mcsd"])
async def test_it_is_not_when_a_drafter_sends_what_it_did_not_draw_from(
    shard: RunningServer, law: NDArray[np.float64], rule: str
) -> None:
    counts = await count_pairs(
        shard,
        rule,
        lambda spec: pretends_to_be_uniform(DRAFTERS[rule](DRAFT_MODEL, spec, PROMPT)),
    )
    assert not chi_square.follows(counts, law)


async def test_fixed_candidates_are_not_for_a_rule_that_expects_draws(
    shard: RunningServer, law: NDArray[np.float64]
) -> None:
    """k-SEQ gets candidates drawn without replacement: each right alone, but not together."""
    drafter = DRAFTERS["recursive"]
    counts = await count_pairs(shard, "kseq", lambda spec: drafter(DRAFT_MODEL, spec, PROMPT))
    assert not chi_square.follows(counts, law)

"""Trees through a real shard: under the coupled rule, any tree gives the text of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from paceline.sampling import SamplingParams, SequenceSpec
from paceline.v1 import target_pb2, types_pb2
from paceline.wire.sequences import spec_to_wire
from tests.workers.grpc_peers import Stepper, open_channel
from workers.engine.cpu.engine import CpuEngine
from workers.engine.slices import Slice
from workers.process.server import RunningServer
from workers.verification.candidates import CandidateTree

VOCAB_SIZE = 384
# Blocks hold 128 positions: trees lie on both sides of the border, and across it.
PROMPT = [(7 * index) % 301 for index in range(113)]
NUM_TOKENS = 40
SPECS = (
    SequenceSpec(SamplingParams(temperature=0.0), seed=0, prompt_length=len(PROMPT)),
    SequenceSpec(SamplingParams(temperature=0.7), seed=5, prompt_length=len(PROMPT)),
    SequenceSpec(SamplingParams(temperature=1.0), seed=3, prompt_length=len(PROMPT)),
    SequenceSpec(
        SamplingParams(
            temperature=0.75,
            top_k=50,
            top_p=0.875,
            repetition_penalty=1.25,
            presence_penalty=0.5,
            frequency_penalty=0.25,
            min_tokens=12,
        ),
        seed=1 << 63,
        prompt_length=len(PROMPT),
        end_token_ids=(0, 2),
    ),
)


def random_tree(random: Random, right: Sequence[int], num_nodes: int) -> CandidateTree:
    """A random tree in which the right tokens have a good chance to appear."""
    token_ids: list[int] = []
    parents: list[int] = []
    # The number of right tokens that lead to a node; None on a wrong path.
    num_right: list[int | None] = [0]
    children: list[set[int]] = [set()]
    for _ in range(num_nodes):
        on_path = [node for node, count in enumerate(num_right) if count is not None]
        parent = (
            random.choice(on_path)
            if random.random() < 0.7
            else random.choice(range(len(num_right)))
        )
        count = num_right[parent]
        token_id = random.randrange(VOCAB_SIZE)
        if count is not None and count < len(right) and random.random() < 0.6:
            token_id = right[count]
        if token_id in children[parent]:
            continue
        is_right = count is not None and count < len(right) and token_id == right[count]
        token_ids.append(token_id)
        parents.append(parent)
        children[parent].add(token_id)
        num_right.append(count + 1 if count is not None and is_right else None)
        children.append(set())
    return CandidateTree(tuple(token_ids), tuple(parents))


def moves_of(first: int, accepted: Sequence[int]) -> list[target_pb2.KvMove]:
    """The moves that bring an accepted path to the positions from `first` on."""
    return [
        target_pb2.KvMove(from_position=first + candidate, to_position=first + depth)
        for depth, candidate in enumerate(accepted)
        if candidate != depth
    ]


def window_of(start: int, last_token: int, tree: CandidateTree) -> dict[str, Any]:
    """The fields of a slice that verifies a tree."""
    return {
        "start": start,
        "token_ids": [last_token, *tree.token_ids],
        "window": len(tree),
        "verdict": True,
        "parents": tree.parents,
    }


async def decode_plainly(shard: RunningServer, spec: SequenceSpec, num_tokens: int) -> list[int]:
    async with open_channel(shard.address) as channel:
        stepper = Stepper(channel)
        text = [*PROMPT, await stepper.open(spec, PROMPT, [0, 1], chunk=100)]
        while len(text) < len(PROMPT) + num_tokens:
            text.append((await stepper.verify(len(text) - 1, text[-1], ())).token_id)
        await stepper.end()
    return text


@pytest.mark.parametrize("spec", SPECS, ids=["greedy", "T=0.7", "T=1", "penalties"])
async def test_trees_change_nothing(shard: RunningServer, spec: SequenceSpec) -> None:
    expected = await decode_plainly(shard, spec, NUM_TOKENS + 12)
    num_accepted = num_moves = num_sideways = 0
    async with open_channel(shard.address) as channel:
        for seed, num_nodes in ((0, 3), (1, 8), (2, 16)):
            random = Random(seed)
            stepper = Stepper(channel)
            text = [*PROMPT, await stepper.open(spec, PROMPT, [3, 1], chunk=64)]
            moves: list[target_pb2.KvMove] = []
            while len(text) < len(PROMPT) + NUM_TOKENS:
                tree = random_tree(random, expected[len(text) :], random.randint(0, num_nodes))
                verdict = await stepper.verify(
                    len(text) - 1, text[-1], tree.token_ids, parents=tree.parents, kv_moves=moves
                )
                assert len(verdict.accepted) == verdict.num_accepted
                moves = moves_of(len(text), verdict.accepted)
                text += [*tree.tokens_of(verdict.accepted), verdict.token_id]
                num_accepted += verdict.num_accepted
                num_moves += len(moves)
                num_sideways += verdict.num_accepted > 0 and verdict.accepted[0] > 0
                assert text == expected[: len(text)]
            await stepper.end()
    assert num_accepted > 30
    assert num_moves > 10
    assert num_sideways > 3


async def test_trees_chains_and_prefill_share_steps(shard: RunningServer) -> None:
    expected = [await decode_plainly(shard, spec, NUM_TOKENS) for spec in SPECS[1:3]]
    async with open_channel(shard.address) as channel:
        stepper = Stepper(channel)
        random = Random(3)
        opened = [
            target_pb2.TargetSequence(sequence_id=index, spec=spec_to_wire(spec))
            for index, spec in enumerate(SPECS[1:3])
        ]
        prompts = [
            target_pb2.Slice(
                sequence_id=index, token_ids=PROMPT, verdict=True, new_blocks=[index, 4 + index]
            )
            for index in range(2)
        ]
        answer = await stepper.send(open=opened, slices=prompts)
        texts = [[*PROMPT, verdict.token_id] for verdict in answer.verdicts]
        moves: list[target_pb2.KvMove] = []
        await stepper.send(open=[target_pb2.TargetSequence(sequence_id=9, spec=opened[0].spec)])
        for turn in range(8):
            tree = random_tree(random, expected[0][len(texts[0]) :], 7)
            chain = CandidateTree.chain(expected[1][len(texts[1]) : len(texts[1]) + turn % 3])
            answer = await stepper.send(
                slices=[
                    target_pb2.Slice(
                        sequence_id=0,
                        kv_moves=moves,
                        top_tokens=True,
                        **window_of(len(texts[0]) - 1, texts[0][-1], tree),
                    ),
                    # A third sequence, whose prompt comes in pieces.
                    target_pb2.Slice(
                        sequence_id=9,
                        start=5 * turn,
                        token_ids=PROMPT[5 * turn : 5 * turn + 5],
                        new_blocks=[7] if turn == 0 else [],
                    ),
                    target_pb2.Slice(
                        sequence_id=1, **window_of(len(texts[1]) - 1, texts[1][-1], chain)
                    ),
                ]
            )
            for index, (verdict, shown) in enumerate(
                zip(answer.verdicts, (tree, chain), strict=True)
            ):
                if index == 0:
                    moves = moves_of(len(texts[0]), verdict.accepted)
                    fed = [texts[0][-1], *tree.token_ids]
                    assert [one.token_id for one in verdict.top_tokens] == fed
                else:
                    assert not verdict.top_tokens
                texts[index] += [*shown.tokens_of(verdict.accepted), verdict.token_id]
                assert texts[index] == expected[index][: len(texts[index])]
        await stepper.end()


async def test_top_tokens_are_those_of_the_path_to_a_token(
    shard: RunningServer, checkpoint: Path
) -> None:
    tree = CandidateTree((20, 21, 22, 23), (0, 0, 2, 1))
    async with open_channel(shard.address) as channel:
        stepper = Stepper(channel)
        await stepper.open(SPECS[0], PROMPT, [0, 1], chunk=100)
        verdict = await stepper.verify(
            len(PROMPT), 9, tree.token_ids, parents=tree.parents, top_tokens=True
        )
        await stepper.end()
    engine = CpuEngine(checkpoint, threads=1, kv_memory_bytes=4 * 1024 * 1024)
    prefixes = [[9], [9, 20], [9, 21], [9, 21, 22], [9, 20, 23]]
    assert len(verdict.top_tokens) == len(prefixes)
    for top_tokens, prefix in zip(verdict.top_tokens, prefixes, strict=True):
        (logits_V,) = engine.step([Slice((0, 1), 0, [*PROMPT, *prefix], 1)])
        assert [top_tokens.previous_id, top_tokens.token_id] == [PROMPT[-1], *prefix][-2:]
        assert list(top_tokens.top_ids) == logits_V.topk(8).indices.tolist()


async def test_top_tokens_of_a_prompt_come_with_the_step_that_feeds_it(
    shard: RunningServer, checkpoint: Path
) -> None:
    opened = target_pb2.TargetSequence(sequence_id=1, spec=spec_to_wire(SPECS[0]))
    async with open_channel(shard.address) as channel:
        stepper = Stepper(channel)
        await stepper.send(open=[opened])
        told: list[types_pb2.TopTokens] = []
        for start, end in ((0, 50), (50, len(PROMPT))):
            answer = await stepper.send(
                slices=[
                    target_pb2.Slice(
                        sequence_id=1,
                        start=start,
                        token_ids=PROMPT[start:end],
                        verdict=end == len(PROMPT),
                        new_blocks=[0, 1] if start == 0 else [],
                        top_tokens=True,
                    )
                ]
            )
            assert len(answer.verdicts) == (end == len(PROMPT))
            parts: list[target_pb2.FedTopTokens | target_pb2.Verdict] = [
                *answer.fed,
                *answer.verdicts,
            ]
            for fed in parts:
                assert fed.sequence_id == 1
                assert len(fed.top_tokens) == end - start
                told += fed.top_tokens
        (verdict,) = answer.verdicts
        after = await stepper.verify(len(PROMPT), verdict.token_id, [], top_tokens=True)
        await stepper.end()
    assert [one.token_id for one in told] == PROMPT
    assert [one.previous_id for one in told[1:]] == PROMPT[:-1]
    assert not told[0].HasField("previous_id")
    assert [one.previous_id for one in after.top_tokens] == [PROMPT[-1]]
    assert [one.token_id for one in after.top_tokens] == [verdict.token_id]
    engine = CpuEngine(checkpoint, threads=1, kv_memory_bytes=4 * 1024 * 1024)
    logits_RV = engine.step([Slice((0, 1), 0, PROMPT, len(PROMPT))])
    assert [list(one.top_ids) for one in told] == logits_RV.topk(8).indices.tolist()

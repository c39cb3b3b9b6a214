"""Steps that no single message can request or answer, through a real shard's servicer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
import torch

from paceline.channel import MAX_MESSAGE_BYTES
from paceline.sampling import SamplingParams, SequenceSpec
from paceline.v1 import target_pb2
from paceline.wire.sequences import spec_to_wire
from tests.tiny import make_tiny_checkpoint
from tests.workers.grpc_peers import Stepper, open_channel
from workers.engine.load.checkpoint import inspect_checkpoint
from workers.engine.slices import KvMoves, Slice
from workers.process.server import start_server
from workers.target import stepper as target_stepper
from workers.target.servicer import TargetShard

VOCAB_SIZE = 384
SPEC = SequenceSpec(SamplingParams(temperature=0.0), seed=0, prompt_length=1)


class DeviceWithoutWeights:
    """The engine of a shard that computes nothing: the likeliest token is always 300.

    A prompt of this length would take a real engine on this host an hour.
    """

    block_size, num_blocks, max_model_len = 128, 8192, 1 << 20
    batch_invariant = True
    dtype = "float32"
    forward_seconds = forward_end = 0.0

    def __init__(self, folder: Path) -> None:
        self.info = replace(inspect_checkpoint(folder), vocab_size=VOCAB_SIZE)
        self._logits_V = torch.zeros(VOCAB_SIZE)
        self._logits_V[300:308] = torch.arange(8, 0, -1)

    def step(self, slices: Sequence[Slice]) -> torch.Tensor:
        return self._logits_V.expand(sum(piece.num_logits for piece in slices), -1)

    def move_kv(self, moves: Sequence[KvMoves]) -> None:
        pass


@pytest_asyncio.fixture
async def address(tmp_path: Path) -> AsyncIterator[str]:
    shard = TargetShard()
    shard.begin(DeviceWithoutWeights(make_tiny_checkpoint(tmp_path)))
    server = await start_server(shard.add_to, host="127.0.0.1")
    yield server.address
    await server.stop()


@pytest.mark.long
async def test_the_followers_of_a_long_prompt_come_step_by_step(address: str) -> None:
    """Those of 700,000 tokens take 26 bytes each, more than fits into a message."""
    prompt_length, chunk = 700_000, 8_192
    told = largest = 0
    opened = target_pb2.TargetSequence(sequence_id=1, spec=spec_to_wire(SPEC))
    async with open_channel(address) as channel:
        stepper = Stepper(channel)
        await stepper.send(open=[opened])
        for start in range(0, prompt_length, chunk):
            fed = [300] * min(chunk, prompt_length - start)
            first, end = -(-start // 128), -(-(start + len(fed)) // 128)
            piece = target_pb2.Slice(
                sequence_id=1,
                start=start,
                token_ids=fed,
                verdict=start + len(fed) == prompt_length,
                new_blocks=range(first, end),
                top_tokens=True,
            )
            answer = await stepper.send(slices=[piece])
            largest = max(largest, answer.ByteSize())
            told += sum(len(one.top_tokens) for one in answer.fed)
            told += sum(len(one.top_tokens) for one in answer.verdicts)
        (verdict,) = answer.verdicts
        await stepper.end()
    assert verdict.token_id == 300
    assert told == prompt_length
    assert largest < 64 * chunk + 1024 < MAX_MESSAGE_BYTES


def _opening(sequence_id: int, prefix: Sequence[int]) -> target_pb2.TargetSequence:
    return target_pb2.TargetSequence(
        sequence_id=sequence_id,
        spec=spec_to_wire(SPEC),
        shared_blocks=range(len(prefix) // 128),
        token_ids=prefix,
    )


async def test_a_step_of_several_messages_is_one_step(address: str) -> None:
    """All openings together have 20 MB."""
    prefix = [300] * 100_096
    count = 100
    async with open_channel(address) as channel:
        stepper = Stepper(channel)
        for first in range(0, count, 25):
            numbers = range(1 + first, 26 + first)
            part = target_pb2.StepRequest(
                step=1, open=[_opening(number, prefix) for number in numbers], more=True
            )
            await stepper.call.write(part)
        slices = [
            target_pb2.Slice(
                sequence_id=number,
                start=len(prefix),
                token_ids=[301],
                verdict=True,
                new_blocks=[1000 + number],
            )
            for number in range(1, 1 + count)
        ]
        answer = await stepper.send(slices=slices)
        assert answer.step == 1
        assert [one.token_id for one in answer.verdicts] == [300] * count
        assert (await stepper.send(close=range(1, 1 + count))).step == 2
        await stepper.end()


@pytest.mark.parametrize(
    ("numbers", "most", "said"),
    [
        ((1, 2), target_stepper.MAX_STEP_BYTES, "step: expected more of step 1, got one of 2"),
        ((1, 1), 400, "more: expected a step of at most 400 bytes, got 5"),
    ],
)
async def test_messages_that_make_no_step_end_the_stream(
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    numbers: tuple[int, int],
    most: int,
    said: str,
) -> None:
    monkeypatch.setattr(target_stepper, "MAX_STEP_BYTES", most)
    async with open_channel(address) as channel:
        stepper = Stepper(channel)
        for number, sequence_id in zip(numbers, (1, 2), strict=True):
            opened = [_opening(sequence_id, [300] * 128)]
            part = target_pb2.StepRequest(step=number, open=opened, more=True)
            await stepper.call.write(part)
        with pytest.raises(grpc.aio.AioRpcError, match=said) as caught:
            await stepper.call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

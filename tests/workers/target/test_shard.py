"""The target shard over real gRPC: the same text for all candidates, windows and streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import grpc
import pytest

from paceline.errors import CheckpointError, UnavailableError
from paceline.sampling import SamplingParams, SequenceSpec
from paceline.v1 import target_pb2, target_pb2_grpc
from paceline.wire.sequences import spec_to_wire
from tests.workers.grpc_peers import DEADLINE, Stepper, open_channel
from workers.process.server import RunningServer
from workers.target.shard import TargetShardOptions, serve_target_shard

PROMPT = [5, 6, 7, 8, 5, 6, 9]
NUM_TOKENS = 40
SPECS = (
    SequenceSpec(SamplingParams(temperature=0.0), seed=0, prompt_length=len(PROMPT)),
    SequenceSpec(SamplingParams(temperature=1.0), seed=3, prompt_length=len(PROMPT)),
    SequenceSpec(
        SamplingParams(
            temperature=0.75,
            top_k=50,
            top_p=0.875,
            repetition_penalty=1.25,
            presence_penalty=0.5,
            frequency_penalty=0.25,
            logit_bias={11: 2.0},
            min_tokens=12,
        ),
        seed=1 << 63,
        prompt_length=len(PROMPT),
        end_token_ids=(0, 2),
    ),
)


async def decode_plainly(channel: grpc.aio.Channel, spec: SequenceSpec) -> list[int]:
    stepper = Stepper(channel)
    text = [*PROMPT, await stepper.open(spec, PROMPT, [0], chunk=100)]
    while len(text) < len(PROMPT) + NUM_TOKENS:
        verdict = await stepper.verify(len(text) - 1, text[-1], ())
        assert verdict.num_accepted == 0
        text.append(verdict.token_id)
    await stepper.end()
    return text


Guess = Callable[[int], Sequence[int]]
"""Gives candidates for the positions from a given one on."""


async def decode_with_candidates(
    stepper: Stepper, text: list[int], guess: Guess, *, until: int
) -> tuple[int, int]:
    """Extend `text` in place. Returns the numbers of verified and of accepted candidates."""
    drafted = accepted = 0
    while len(text) < until:
        candidates = list(guess(len(text)))
        verdict = await stepper.verify(len(text) - 1, text[-1], candidates)
        text += [*candidates[: verdict.num_accepted], verdict.token_id]
        drafted += len(candidates)
        accepted += verdict.num_accepted
    return drafted, accepted


def guesser(expected: Sequence[int], random: Random, share_right: float, window: int) -> Guess:
    """Gives right tokens with the chance `share_right`, and wrong ones otherwise."""

    def guess(position: int) -> list[int]:
        right = expected[position : position + random.randint(0, window)]
        return [
            token if random.random() < share_right else (token + 1 + random.randrange(300)) % 384
            for token in right
        ]

    return guess


@pytest.mark.parametrize("spec", SPECS, ids=["greedy", "sampled", "penalties"])
async def test_candidates_change_nothing(shard: RunningServer, spec: SequenceSpec) -> None:
    async with open_channel(shard.address) as channel:
        expected = await decode_plainly(channel, spec)
        random = Random(0)
        for window, share_right, chunk in ((1, 0.5, 2), (4, 0.8, 3), (8, 0.9, 100), (8, 0.0, 1)):
            stepper = Stepper(channel)
            text = [*PROMPT, await stepper.open(spec, PROMPT, [3, 1], chunk=chunk)]
            guess = guesser(expected, random, share_right, window)
            drafted, accepted = await decode_with_candidates(
                stepper, text, guess, until=len(expected)
            )
            await stepper.end()
            assert text[: len(expected)] == expected
            assert drafted > 0
            assert (accepted > 0) == (share_right > 0)


async def test_sequences_of_one_step_do_not_disturb_each_other(shard: RunningServer) -> None:
    async with open_channel(shard.address) as channel:
        expected = [await decode_plainly(channel, spec) for spec in SPECS]
        stepper = Stepper(channel)
        prompts = [
            target_pb2.Slice(
                sequence_id=index, token_ids=PROMPT, verdict=True, new_blocks=[index + 4]
            )
            for index in range(len(SPECS))
        ]
        response = await stepper.send(
            open=[
                target_pb2.TargetSequence(sequence_id=index, spec=spec_to_wire(spec))
                for index, spec in enumerate(SPECS)
            ],
            slices=prompts,
        )
        texts = [[*PROMPT, verdict.token_id] for verdict in response.verdicts]
        random = Random(1)
        while min(len(text) for text in texts) < len(expected[0]):
            guesses = [
                guesser(whole, random, 0.7, 4)(len(text))
                for whole, text in zip(expected, texts, strict=True)
            ]
            slices = [
                target_pb2.Slice(
                    sequence_id=index,
                    start=len(text) - 1,
                    token_ids=[text[-1], *guess],
                    window=len(guess),
                    verdict=True,
                )
                for index, (text, guess) in enumerate(zip(texts, guesses, strict=True))
            ]
            response = await stepper.send(slices=slices)
            assert [verdict.sequence_id for verdict in response.verdicts] == [0, 1, 2]
            for text, guess, verdict in zip(texts, guesses, response.verdicts, strict=True):
                text += [*guess[: verdict.num_accepted], verdict.token_id]
        assert [text[: len(expected[0])] for text in texts] == expected
        await stepper.send(close=[0, 1, 2])
        await stepper.end()


async def test_a_broken_stream_is_taken_up_by_the_next(shard: RunningServer) -> None:
    spec = SPECS[1]
    async with open_channel(shard.address) as channel:
        expected = await decode_plainly(channel, spec)
        first = Stepper(channel)
        text = [*PROMPT, await first.open(spec, PROMPT, [0], chunk=100)]
        guess = guesser(expected, Random(2), 0.8, 4)
        await decode_with_candidates(first, text, guess, until=20)
        first.call.cancel()
        second, token_id = await _opened_in_time(channel, spec, text)
        text.append(token_id)
        await decode_with_candidates(second, text, guess, until=len(expected))
        await second.end()
        assert text[: len(expected)] == expected


async def _opened_in_time(
    channel: grpc.aio.Channel, spec: SequenceSpec, text: list[int]
) -> tuple[Stepper, int]:
    """Open a stream with a sequence. Returns it and the token after `text`.

    If it is refused, it tries again as a driver does: on a busy host, the earlier stream may end
    late.
    """
    async with asyncio.timeout(DEADLINE):
        while True:
            stepper = Stepper(channel)
            try:
                return stepper, await stepper.open(spec, text, [7], chunk=100)
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.FAILED_PRECONDITION:
                    raise


async def test_steps_may_be_sent_ahead(shard: RunningServer) -> None:
    async with open_channel(shard.address) as channel:
        expected = await decode_plainly(channel, SPECS[0])
        stepper = Stepper(channel)
        await stepper.open(SPECS[0], PROMPT, [0], chunk=100)
        for position in range(len(PROMPT), len(PROMPT) + 5):
            stepper.step_number += 1
            piece = target_pb2.Slice(
                sequence_id=1, start=position, token_ids=[expected[position]], verdict=True
            )
            await stepper.call.write(
                target_pb2.StepRequest(step=stepper.step_number, slices=[piece])
            )
        for position in range(len(PROMPT), len(PROMPT) + 5):
            response = await stepper.call.read()
            assert response.verdicts[0].token_id == expected[position + 1]
            assert response.gap_seconds > 0
            assert 0 < response.forward_seconds <= response.step_seconds
        await stepper.end()


async def test_a_second_stream_is_refused_while_one_is_live(shard: RunningServer) -> None:
    async with open_channel(shard.address) as channel:
        first = Stepper(channel)
        await first.open(SPECS[0], PROMPT, [0], chunk=100)
        second = Stepper(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await second.call.read()
        assert refusal.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        await first.verify(len(PROMPT), 5, ())
        await first.end()


async def test_a_malformed_step_ends_the_stream_and_names_the_field(shard: RunningServer) -> None:
    async with open_channel(shard.address) as channel:
        stepper = Stepper(channel)
        await stepper.open(SPECS[0], PROMPT, [0], chunk=100)
        bad = target_pb2.Slice(sequence_id=1, start=99, token_ids=[5], verdict=True)
        await stepper.call.write(target_pb2.StepRequest(step=3, slices=[bad]))
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stepper.call.read()
        assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        details = refusal.value.details() or ""
        assert details.startswith("slices[0].start: expected at most 7")
        # The next stream finds the shard in order.
        await decode_plainly(channel, SPECS[0])


async def test_it_describes_itself(shard: RunningServer, checkpoint: Path) -> None:
    async with open_channel(shard.address) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        answer = await stub.DescribeTarget(target_pb2.DescribeTargetRequest(), timeout=DEADLINE)
    assert answer.model == checkpoint.name
    assert (answer.vocab_size, answer.max_model_len, answer.block_size) == (384, 512, 128)
    assert answer.num_blocks * answer.block_size >= answer.max_model_len
    assert len(answer.vocabulary_digest) == 32
    assert list(answer.end_token_ids) == [2, 0]
    assert answer.batch_invariant


async def test_a_broken_checkpoint_leaves_no_server(tmp_path: Path) -> None:
    port = await _free_port()
    options = TargetShardOptions(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="nowhere"):
        await serve_target_shard(options, host="127.0.0.1", port=port)
    listener = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", port)
    # A port in use is reported before anything is loaded.
    with pytest.raises(UnavailableError, match=str(port)):
        await serve_target_shard(options, host="127.0.0.1", port=port)
    listener.close()
    await listener.wait_closed()


async def _free_port() -> int:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return port

"""Drafters over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from paceline.errors import ConfigError
from paceline.prefix_hash import hash_prefix
from paceline.sampling import SamplingParams, SequenceSpec
from paceline.v1 import drafting_pb2, drafting_pb2_grpc
from paceline.wire.sequences import spec_to_wire
from tests.tiny import make_tiny_checkpoint
from tests.workers.grpc_peers import (
    DEADLINE,
    END,
    DraftStream,
    Stepper,
    open_channel,
    proposals_in,
)
from workers.drafting.drafter import serve_drafter
from workers.drafting.kind import DrafterOptions
from workers.drafting.kinds.model import MODEL, ModelOptions, load_model_proposer
from workers.drafting.kinds.model.proposer import ModelProposer
from workers.process.server import RunningServer
from workers.target.shard import TargetShardOptions, serve_target_shard

PROMPT = [5, 6, 7, 8, 5, 6, 9]
SPEC = SequenceSpec(SamplingParams(temperature=1.0), seed=3, prompt_length=len(PROMPT))
BLOCK_BYTES = 2 * 2 * 2 * 128 * 8 * 4  # layers, keys and values, heads, positions, size, float32


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


def batch_of(*requests: drafting_pb2.DraftRequest) -> drafting_pb2.DraftRequest:
    return drafting_pb2.DraftRequest(batch=drafting_pb2.DraftRequestBatch(requests=requests))


def model_options(checkpoint: Path, *, blocks: int = 16) -> DrafterOptions:
    kv_memory_bytes = blocks * BLOCK_BYTES
    return DrafterOptions(
        "model", checkpoint, weights="float32", threads=1, kv_memory_bytes=kv_memory_bytes
    )


@pytest.fixture
async def drafter(checkpoint: Path) -> AsyncIterator[RunningServer]:
    server = await serve_drafter(model_options(checkpoint), host="127.0.0.1")
    yield server
    await server.stop()


@pytest.fixture
async def ngram_drafter() -> AsyncIterator[RunningServer]:
    server = await serve_drafter(DrafterOptions("ngram", max_sequences=3), host="127.0.0.1")
    yield server
    await server.stop()


async def target_text(checkpoint: Path, num_tokens: int) -> list[int]:
    """The text of a target with the same weights. The drafter is always right about it."""
    options = TargetShardOptions(checkpoint, threads=1, kv_memory_bytes=16 * BLOCK_BYTES)
    server = await serve_target_shard(options, host="127.0.0.1")
    async with open_channel(server.address) as channel:
        stepper = Stepper(channel)
        text = [*PROMPT, await stepper.open(SPEC, PROMPT, [0], chunk=100)]
        while len(text) < num_tokens:
            text.append((await stepper.verify(len(text) - 1, text[-1], ())).token_id)
        await stepper.end()
    await server.stop()
    return text


async def test_a_drafter_with_the_targets_weights_is_always_right(
    drafter: RunningServer, checkpoint: Path
) -> None:
    text = await target_text(checkpoint, 30)
    async with open_channel(drafter.address) as channel:
        stream = DraftStream(channel)
        await stream.open(1, SPEC, PROMPT)
        await stream.grant(1, 20)
        proposals = await stream.proposals(20 - len(PROMPT))
        for length, proposal in enumerate(proposals, start=len(PROMPT)):
            assert proposal.sequence_id == 1
            assert (proposal.base.length, list(proposal.token_ids)) == (length, [text[length]])
            assert proposal.base.hash == hash_prefix(text[:length])
        # The target disagrees at position 10: the rest is dropped and drafted anew.
        other = (text[10] + 1) % 384
        await stream.outcome(1, len(PROMPT), [*text[len(PROMPT) : 10], other])
        (proposal, *_) = await stream.proposals(9)
        assert proposal.base.length == 11
        assert proposal.base.hash == hash_prefix([*text[:10], other])


async def test_sequences_are_drafted_together_and_streams_apart(drafter: RunningServer) -> None:
    async with open_channel(drafter.address) as channel:
        first, second = DraftStream(channel), DraftStream(channel)
        for number in (1, 2):
            await first.open(number, SPEC, PROMPT)
            await first.grant(number, 300)
        await second.open(1, SPEC, PROMPT)
        await second.grant(1, 300)
        # Both streams get their drafts while neither is through.
        answers = await asyncio.gather(first.proposals(400), second.proposals(200))
        assert {proposal.sequence_id for proposal in answers[0]} == {1, 2}
        drafts = [
            [list(proposal.token_ids) for proposal in answer if proposal.sequence_id == 1][:100]
            for answer in answers
        ]
        assert drafts[0] == drafts[1]


async def test_a_cancelled_stream_frees_its_sequences(checkpoint: Path) -> None:
    # The pool holds one sequence of 512 tokens and no more.
    options = model_options(checkpoint, blocks=4)
    drafter = await serve_drafter(options, host="127.0.0.1")
    long_prompt = [token % 300 for token in range(500)]
    async with open_channel(drafter.address) as channel:
        first, second = DraftStream(channel), DraftStream(channel)
        await first.open(1, SPEC, long_prompt)
        await first.grant(1, 502)
        await first.proposals(1)
        await second.open(1, SPEC, long_prompt)
        assert "KV memory is full" in (await second.read()).declined.reason
        first.call.cancel()
        third = DraftStream(channel)
        async with asyncio.timeout(DEADLINE):
            while True:
                await third.open(2, SPEC, long_prompt)
                await third.grant(2, 502)
                response = await third.read()
                if response.HasField("proposals"):
                    break
                await asyncio.sleep(0.02)
    await drafter.stop()


async def test_a_batch_means_what_its_requests_mean_alone(drafter: RunningServer) -> None:
    def opened(number: int, length: int) -> drafting_pb2.DraftRequest:
        return drafting_pb2.DraftRequest(
            open=drafting_pb2.OpenSequence(
                sequence_id=number, spec=spec_to_wire(SPEC), token_ids=[5] * length
            )
        )

    def granted(number: int) -> drafting_pb2.DraftRequest:
        return drafting_pb2.DraftRequest(
            grant=drafting_pb2.Grant(sequence_id=number, until_position=20, branches=1)
        )

    async with open_channel(drafter.address) as channel:
        stream = DraftStream(channel)
        message = batch_of(opened(1, 8), granted(1), opened(2, 512), opened(3, 9), granted(3))
        await stream.call.write(message)
        assert (await stream.read()).declined.sequence_id == 2
        # All was handled before the pass: its first message has drafts of both.
        proposals = proposals_in((await stream.read()).proposals)
        assert {proposal.sequence_id for proposal in proposals} == {1, 3}


async def test_a_prompt_beyond_the_context_is_declined(drafter: RunningServer) -> None:
    async with open_channel(drafter.address) as channel:
        stream = DraftStream(channel)
        await stream.open(4, SPEC, [1] * 512)
        declined = (await stream.read()).declined
        assert declined.sequence_id == 4
        assert "context of 512" in declined.reason
        # Messages about it are ignored from now on.
        await stream.grant(4, 600)
        await stream.close(4)
        await stream.open(5, SPEC, [1] * 511)
        await stream.grant(5, 600)
        (proposal,) = await stream.proposals(1)
        assert (proposal.sequence_id, proposal.last) == (5, True)


async def test_ngrams_come_in_one_go(ngram_drafter: RunningServer) -> None:
    async with open_channel(ngram_drafter.address) as channel:
        stream = DraftStream(channel)
        await stream.open(1, SPEC, [1, 2, 3, 4, 5, 1, 2])
        await stream.grant(1, 10)
        batch = (await stream.read()).proposals
        assert [list(proposal.token_ids) for proposal in batch.proposals] == [[3, 4, 5]]
        assert batch.tokens_fed == 0
        await stream.outcome(1, 7, [9])
        await stream.grant(1, 12)
        (proposal,) = proposals_in((await stream.read()).proposals)
        assert (list(proposal.token_ids), proposal.last) == ([], True)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (drafting_pb2.DraftRequest(), "message: expected"),
        (
            drafting_pb2.DraftRequest(outcome=drafting_pb2.Outcome(sequence_id=1, position=7)),
            "outcome.token_ids: expected at least one",
        ),
        (
            drafting_pb2.DraftRequest(
                outcome=drafting_pb2.Outcome(sequence_id=1, position=8, token_ids=[1])
            ),
            "outcome.position: expected 7",
        ),
        (
            drafting_pb2.DraftRequest(grant=drafting_pb2.Grant(sequence_id=1, until_position=9)),
            "grant.branches: expected at least 1",
        ),
        (
            drafting_pb2.DraftRequest(open=drafting_pb2.OpenSequence(token_ids=[1])),
            "open.spec.sampling",
        ),
        (
            drafting_pb2.DraftRequest(
                open=drafting_pb2.OpenSequence(spec=spec_to_wire(replace(SPEC, rule="dice")))
            ),
            "open.spec.rule: expected one of coupled, kseq",
        ),
        (batch_of(), "batch.requests: expected at least one"),
        (batch_of(batch_of()), "batch.requests[0].message: expected open, outcome, grant or close"),
        (
            batch_of(
                drafting_pb2.DraftRequest(close=drafting_pb2.CloseSequence(sequence_id=2)),
                drafting_pb2.DraftRequest(grant=drafting_pb2.Grant(sequence_id=1)),
            ),
            "batch.requests[1].grant.branches: expected at least 1",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_malformed_message_ends_the_stream_and_names_the_field(
    drafter: RunningServer, request_: drafting_pb2.DraftRequest, message: str
) -> None:
    async with open_channel(drafter.address) as channel:
        stream = DraftStream(channel)
        await stream.open(1, SPEC, PROMPT)
        await stream.call.write(request_)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stream.call.read()
        assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert (refusal.value.details() or "").startswith(message)


async def test_a_stream_that_ends_well_ends_well(ngram_drafter: RunningServer) -> None:
    async with open_channel(ngram_drafter.address) as channel:
        stream = DraftStream(channel)
        await stream.open(1, SPEC, PROMPT)
        await stream.call.done_writing()
        assert await stream.call.read() is END
        assert await stream.call.code() == grpc.StatusCode.OK


async def test_they_describe_themselves(
    drafter: RunningServer, ngram_drafter: RunningServer, checkpoint: Path
) -> None:
    answers = []
    for server in (drafter, ngram_drafter):
        async with open_channel(server.address) as channel:
            stub = drafting_pb2_grpc.DraftingServiceStub(channel)
            request = drafting_pb2.DescribeDrafterRequest()
            answers.append(await stub.DescribeDrafter(request, timeout=DEADLINE))
    model, ngram = answers
    assert (model.kind, model.model, model.vocab_size) == ("model", checkpoint.name, 384)
    assert (model.max_position, len(model.vocabulary_digest)) == (512, 32)
    assert (ngram.kind, ngram.model, ngram.vocab_size) == ("ngram", "", 0)
    assert ngram.vocabulary_digest == b""
    assert ngram.max_position > 1_000_000


async def test_a_model_drafter_has_limits_of_its_own(checkpoint: Path) -> None:
    """They take the place of the checkpoint's context and of the target's KV memory."""
    own = ModelOptions(max_model_len=64, kv_memory_mib=1)
    options = replace(model_options(checkpoint), of_kind=own)
    proposer = await load_model_proposer(options)
    assert isinstance(proposer, ModelProposer)
    assert proposer.info.max_position == 64
    assert proposer._engine.num_blocks == (1 << 20) // BLOCK_BYTES
    MODEL.check(options)
    with pytest.raises(ConfigError, match="max_model_len"):
        MODEL.check(replace(options, of_kind=ModelOptions(max_model_len=99_999)))


async def test_a_model_drafter_needs_a_folder() -> None:
    with pytest.raises(ConfigError, match="checkpoint folder"):
        await serve_drafter(DrafterOptions("model"), host="127.0.0.1")

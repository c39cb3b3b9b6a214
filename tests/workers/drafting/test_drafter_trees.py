"""Trees, rules and stopping rules of drafters over real gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from paceline.sampling import SamplingParams, SequenceSpec
from paceline.v1 import drafting_pb2, drafting_pb2_grpc, types_pb2
from paceline.wire.sequences import spec_to_wire
from tests.tiny import make_tiny_checkpoint
from tests.workers.grpc_peers import DEADLINE, DraftStream, open_channel, proposals_in
from workers.drafting.drafter import serve_drafter
from workers.drafting.kind import DrafterOptions
from workers.drafting.wire import distributions_from_wire
from workers.process.server import RunningServer
from workers.verification.candidates import CandidateTree, check_proposal
from workers.verification.rule import RULES

PROMPT = [5, 6, 7, 8, 5, 6, 9]
VOCAB_SIZE = 384


@pytest.fixture
async def drafter(tmp_path: Path) -> AsyncIterator[RunningServer]:
    options = DrafterOptions(
        "model",
        make_tiny_checkpoint(tmp_path / "tiny", vocab_size=VOCAB_SIZE),
        weights="float32",
        kv_memory_bytes=1 << 20,
    )
    server = await serve_drafter(options, host="127.0.0.1")
    yield server
    await server.stop()


def open_request(
    rule: str, stopping: types_pb2.StoppingRule.ValueType = types_pb2.STOPPING_RULE_UNSPECIFIED
) -> drafting_pb2.DraftRequest:
    spec = SequenceSpec(SamplingParams(), seed=3, prompt_length=len(PROMPT), rule=rule)
    opening = drafting_pb2.OpenSequence(sequence_id=1, spec=spec_to_wire(spec), token_ids=PROMPT)
    opening.drafting.stopping = stopping
    return drafting_pb2.DraftRequest(open=opening)


def grant_request(branches: int, nodes: int) -> drafting_pb2.DraftRequest:
    grant = drafting_pb2.Grant(
        sequence_id=1, until_position=len(PROMPT) + 4, branches=branches, nodes=nodes
    )
    return drafting_pb2.DraftRequest(grant=grant)


async def proposals_to_the_last(stream: DraftStream) -> list[drafting_pb2.Proposal]:
    found: list[drafting_pb2.Proposal] = []
    while not any(proposal.last for proposal in found):
        found += proposals_in((await stream.read()).proposals)
    return found


@pytest.mark.parametrize(
    ("rule", "branches"),
    [("coupled", 3), ("kseq", 3), ("recursive", 3), ("mcsd", 3), ("rejection", 1)],
)
async def test_proposals_are_such_as_their_rule_can_verify(
    drafter: RunningServer, rule: str, branches: int
) -> None:
    async with open_channel(drafter.address) as channel:
        stream = DraftStream(channel)
        await stream.call.write(open_request(rule))
        await stream.call.write(grant_request(branches, 12 if branches > 1 else 4))
        proposals = await proposals_to_the_last(stream)
        for proposal in proposals:
            token_ids = tuple(proposal.token_ids)
            tree = CandidateTree(
                token_ids,
                tuple(proposal.parents) or tuple(range(len(token_ids))),
                tuple(proposal.multiplicities),
            )
            pairs = distributions_from_wire(proposal.distributions)
            check_proposal(rule, tree, pairs, vocab_size=VOCAB_SIZE, max_nodes=12)
        # Where candidates may stand without their siblings they come one by one.
        bases = [proposal.base.hash for proposal in proposals if proposal.token_ids]
        beside = len(set(bases)) < len(bases) or any(proposal.parents for proposal in proposals)
        assert beside == (branches > 1)
        if rule == "coupled":
            assert not any(proposal.parents for proposal in proposals)
        assert not any(proposal.stopping_state for proposal in proposals)


async def test_the_stopping_rule_is_the_sequences_own(drafter: RunningServer) -> None:
    async with open_channel(drafter.address) as channel:
        stream = DraftStream(channel)
        await stream.call.write(open_request("coupled", types_pb2.STOPPING_RULE_ADAEDL))
        await stream.call.write(grant_request(1, 4))
        first, *others = await proposals_to_the_last(stream)
        assert set(first.stopping_state) == {"threshold", "acceptance_rate"}
        assert not any(proposal.stopping_state for proposal in others)


async def test_a_rule_that_it_cannot_serve_is_declined(drafter: RunningServer) -> None:
    async with open_channel(drafter.address) as channel:
        stream = DraftStream(channel)
        await stream.call.write(open_request("one-hot"))
        assert "cannot draft for the rule 'one-hot'" in (await stream.read()).declined.reason
        stub = drafting_pb2_grpc.DraftingServiceStub(channel)
        info = await stub.DescribeDrafter(drafting_pb2.DescribeDrafterRequest(), timeout=DEADLINE)
        assert set(info.rules) == set(RULES) - {"one-hot"}
        assert not info.wants_top_tokens


async def test_an_unknown_stopping_rule_ends_the_stream(drafter: RunningServer) -> None:
    async with open_channel(drafter.address) as channel:
        stream = DraftStream(channel)
        request = open_request("coupled")
        request.open.drafting.stopping = types_pb2.StoppingRule.ValueType(77)
        await stream.call.write(request)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stream.call.read()
        assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "open.drafting.stopping" in (refusal.value.details() or "")

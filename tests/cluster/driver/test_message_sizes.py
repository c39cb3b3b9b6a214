"""What exceeds a message is sent in several: openings at the target and at drafters."""

from __future__ import annotations

import asyncio

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.decoding.events import DrafterJoined
from cluster.decoding.instructions import (
    DraftInstruction,
    OpenAtTarget,
    OpenDraft,
    RunStep,
    SendGrant,
    SendOutcome,
    Slice,
)
from cluster.driver import worker_messages
from cluster.driver.drafter_links import DrafterLink, TargetVocabulary
from cluster.driver.meters import WorkerMeter
from cluster.driver.worker_messages import (
    drafts_to_wire,
    step_messages,
    step_to_wire,
)
from paceline import GenerateOptions
from paceline.channel import MAX_MESSAGE_BYTES
from paceline.limits import MAX_BIASED_TOKENS, MAX_SEQUENCE_TOKENS, MAX_STOP_TOKENS
from paceline.sampling import SamplingParams, SequenceSpec
from paceline.v1 import drafting_pb2, inference_pb2, inference_pb2_grpc
from tests.cluster.system import (
    HOST,
    Checkpoints,
    eventually,
    running_system,
    start_drafter,
)
from tests.tiny import make_tiny_checkpoint
from workers.drafting.drafter import serve_drafter
from workers.drafting.kind import DrafterOptions
from workers.drafting.tree import Grant
from workers.process.handshake import DriverIdentity
from workers.target.stepper import StepParts
from workers.verification.candidates import SparseProbs

SPEC = SequenceSpec(SamplingParams(), seed=1, prompt_length=3)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_messages, "PART_BYTES", 100)


SLICES = st.builds(
    Slice,
    sequence_id=st.integers(1, 9),
    start=st.just(3),
    token_ids=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=9).map(tuple),
    window=st.just(0),
    verdict=st.booleans(),
    new_blocks=st.just(()),
    distributions=st.sampled_from([{}, {0: SparseProbs(np.array([4, 5]), np.array([0.5, 0.5]))}]),
)
OPENS = st.builds(
    OpenAtTarget,
    sequence_id=st.integers(1, 9),
    spec=st.just(SPEC),
    shared_blocks=st.just(()),
    token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=40).map(tuple),
)


@pytest.mark.usefixtures("small_parts")
@given(
    opens=st.lists(OPENS, max_size=6),
    slices=st.lists(SLICES, max_size=6),
    closes=st.lists(st.integers(1, 9), max_size=3),
)
def test_a_step_in_parts_is_the_step(
    opens: list[OpenAtTarget], slices: list[Slice], closes: list[int]
) -> None:
    step = RunStep(7, tuple(opens), tuple(closes), tuple(slices))
    messages = step_messages(step)
    for message in messages if opens else ():
        few = len(message.open) + len(message.slices) < 2
        assert few or message.ByteSize() < 110 + 2 * len(closes)
    parts = StepParts()
    joined = [parts.add(message) for message in messages]
    assert joined[:-1] == [None] * (len(messages) - 1)
    assert joined[-1] == step_to_wire(step)


@pytest.mark.usefixtures("small_parts")
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_openings_at_a_drafter_keep_their_order(lengths: list[int]) -> None:
    instructions: list[DraftInstruction] = []
    for number, length in enumerate(lengths):
        instructions.append(OpenDraft("d", number, SPEC, (300,) * length))
        instructions.append(SendGrant("d", number, Grant(9)))
        instructions.append(SendOutcome("d", number, length, (5,)))
    told = []
    for message in drafts_to_wire(instructions):
        assert message.ByteSize() < 120 or len(message.batch.requests) < 2
        for request in message.batch.requests:
            kind = request.WhichOneof("message")
            assert kind is not None
            told.append(getattr(request, kind).sequence_id)
    assert told == [number for number in range(len(lengths)) for _ in range(3)]


def test_the_longest_opening_fits_into_a_message() -> None:
    """The limits of a request bound an opening, whatever the model."""
    bias = {2**32 - 1 - number: 1.0 for number in range(MAX_BIASED_TOKENS)}
    ends = (2**32 - 1,) * (MAX_STOP_TOKENS + 100)
    spec = SequenceSpec(SamplingParams(logit_bias=bias), 2**64 - 1, 2**32 - 1, 0, ends)
    text = (2**32 - 1,) * MAX_SEQUENCE_TOKENS
    blocks = (2**32 - 1,) * (MAX_SEQUENCE_TOKENS // 16)
    opened = OpenAtTarget(2**64 - 1, spec, blocks, text)
    (message,) = step_messages(RunStep(1, (opened,), (), ()))
    assert message.ByteSize() < 12 * 1024 * 1024 < MAX_MESSAGE_BYTES


class Answers:
    """Listens to one drafter: which sequences it has answered, and whether it was lost."""

    def __init__(self) -> None:
        self.joined = asyncio.Event()
        self.answered: set[int] = set()
        self.losses = 0

    def drafter_joined(self, joined: DrafterJoined) -> None:
        self.joined.set()

    def drafter_lost(self, name: str) -> None:
        self.losses += 1

    def proposed(self, name: str, batch: drafting_pb2.ProposalBatch, *_: object) -> int:
        self.answered |= {one.sequence_id for one in batch.proposals}
        return 0

    def declined(self, name: str, sequence_id: int, reason: str, **_: object) -> None:
        raise AssertionError(reason)


async def test_a_drafter_joins_64_sequences_of_100_000_tokens() -> None:
    """In one message they would have 19 MB."""
    server = await serve_drafter(DrafterOptions("recycling", max_sequences=64), host=HOST)
    hears = Answers()
    meter = WorkerMeter("d", "recycling", server.address)
    vocabulary = TargetVocabulary("m", b"")
    link = DrafterLink(meter, hears, vocabulary, DriverIdentity(), life=None, probe_timeout=60.0)
    running = asyncio.create_task(link.run())
    try:
        async with asyncio.timeout(60):
            await hears.joined.wait()
        text = tuple(range(100_000, 200_000))
        instructions: list[DraftInstruction] = []
        for number in range(64):
            instructions.append(OpenDraft("d", number, SPEC, text))
            instructions.append(SendGrant("d", number, Grant(len(text) + 4)))
        link.send(instructions)
        await eventually(lambda: len(hears.answered) == 64 or hears.losses > 0)
        assert hears.losses == 0
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop()


BYSTANDERS = 8
MANY = 300
"""Requests with the most entries of a bias each: openings of 17 MB for a drafter that joins."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Checkpoints with more tokens than a bias may have entries."""
    folder = tmp_path_factory.mktemp("sizes")
    return Checkpoints(*[make_tiny_checkpoint(folder / name, vocab_size=5000) for name in "td"])


def _bystander(number: int) -> GenerateOptions:
    return GenerateOptions(temperature=1.0, seed=number, max_tokens=400, ignore_eos=True)


async def test_biases_on_the_whole_vocabulary_are_refused_beside_others(
    checkpoints: Checkpoints,
) -> None:
    """With a real vocabulary, 32 such openings have 57 MB."""
    request = inference_pb2.GenerateRequest(prompt="a", max_tokens=4)
    for token_id in range(5000):
        request.sampling.logit_bias[token_id] = 0.5
    async with running_system(checkpoints) as system:
        alone = await system.client.generate("a", _bystander(1))
        beside = asyncio.create_task(system.client.generate("a", _bystander(1)))
        await eventually(lambda: system.driver.scheduler.num_running == 1)
        async with grpc.aio.insecure_channel(system.server.address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)

            async def ask() -> None:
                async for _ in stub.Generate(request, timeout=120):
                    pass

            ends = await asyncio.gather(*[ask() for _ in range(32)], return_exceptions=True)
        found = await beside
        await system.settle()
    for end in ends:
        assert isinstance(end, grpc.aio.AioRpcError), end
        assert end.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert end.details() == "logit_bias: expected at most 4,096 entries, got 5,000"
    assert (alone.token_ids, alone.text) == (found.token_ids, found.text)


@pytest.mark.long
async def test_a_drafter_joins_amid_many_sequences(checkpoints: Checkpoints) -> None:
    """It gets all of them at once. Sequences that ran before continue as if they were alone."""
    biased = GenerateOptions(
        logit_bias=dict.fromkeys(range(MAX_BIASED_TOKENS), 0.5), temperature=0.0, ignore_eos=True
    )
    async with running_system(
        checkpoints, max_num_seqs=MANY + BYSTANDERS, kv_memory_mib=64, drafter_timeout=120.0
    ) as system:
        scheduler = system.driver.scheduler
        alone = [await system.client.generate("a", _bystander(n)) for n in range(BYSTANDERS)]
        beside = [
            asyncio.create_task(system.client.generate("a", _bystander(n)))
            for n in range(BYSTANDERS)
        ]
        await eventually(lambda: scheduler.num_running == BYSTANDERS)
        many = [asyncio.create_task(system.client.generate([300 + n], biased)) for n in range(MANY)]
        await eventually(lambda: scheduler.num_running == MANY + BYSTANDERS, 600)
        drafter = await start_drafter("recycling", max_sequences=MANY + BYSTANDERS)
        try:
            await system.driver.set_drafters({"d": drafter.address})
            await eventually(lambda: system.driver.stats().drafted > MANY, 600)
            _, joined = system.driver.stats().workers
            for task in many:
                task.cancel()
            found = await asyncio.gather(*beside)
        finally:
            await drafter.stop()
        await system.settle()
    assert joined.reconnects == 0
    for one, other in zip(alone, found, strict=True):
        assert (one.token_ids, one.text) == (other.token_ids, other.text)

"""A target of several shard processes behind a driver: the text of one shard, despite faults."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from cluster.driver.connections import open_stream
from cluster.driver.driver import DriverOptions
from cluster.driver.service import serve_driver
from paceline import AsyncClient, Chunk, GenerateOptions, Structure, WorkerStats
from paceline.errors import CheckpointError
from paceline.v1 import target_pb2, target_pb2_grpc
from tests.cluster.shard_processes import ShardProcesses
from tests.cluster.system import HOST, start_drafter, start_target
from tests.release import at_release
from tests.tiny import make_tiny_checkpoint
from tests.workers.grpc_peers import DEADLINE, hello_to_shard, open_channel
from workers.process.handshake import DriverIdentity

PROMPT = "The quick brown fox"
RESTART_SECONDS = 120.0
"""A process that starts on a busy machine takes long to import torch."""
CHOICES = {
    "greedy": GenerateOptions(temperature=0.0, max_tokens=60, ignore_eos=True),
    "sampled": GenerateOptions(temperature=0.8, seed=5, max_tokens=60, ignore_eos=True),
    "filtered": GenerateOptions(
        temperature=0.9, top_k=20, top_p=0.9, repetition_penalty=1.2, seed=6, max_tokens=60
    ),
    "structured": GenerateOptions(
        temperature=1.0, structure=Structure.regex("[a-z]+( [a-z]+)*"), seed=7, max_tokens=60
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model") / "target")


@pytest.fixture(scope="module")
def shards(folder: Path) -> Iterator[ShardProcesses]:
    with ShardProcesses([folder, folder]) as shards:
        yield shards


@asynccontextmanager
async def client_of(
    folder: Path, addresses: tuple[str, ...], drafters: dict[str, str] | None = None
) -> AsyncIterator[AsyncClient]:
    options = DriverOptions(
        folder=folder,
        target_addresses=addresses,
        drafter_addresses=drafters or {},
        target_patience=RESTART_SECONDS,
    )
    _, server = await serve_driver(options, host=HOST)
    try:
        async with AsyncClient(server.address) as client:
            yield client
    finally:
        await server.stop()


async def passes_of_both(client: AsyncClient) -> tuple[WorkerStats, WorkerStats]:
    """The counts of two ranks. Either may answer the last step later than the other."""
    deadline = time.monotonic() + DEADLINE
    while True:
        first, second = (one for one in (await client.stats()).workers if one.kind == "target")
        if first.passes == second.passes or time.monotonic() > deadline:
            return first, second
        await asyncio.sleep(0.05)


async def test_the_text_is_that_of_one_shard_with_drafts_and_without(
    folder: Path, shards: ShardProcesses
) -> None:
    target = await start_target(folder)
    async with client_of(folder, (target.address,)) as client:
        alone = {name: await client.generate(PROMPT, options) for name, options in CHOICES.items()}
    await target.stop()
    drafter = await start_drafter(None)
    async with client_of(folder, shards.addresses, {"drafter-0": drafter.address}) as client:
        answers = await asyncio.gather(
            *[client.generate(PROMPT, options) for options in CHOICES.values()]
        )
        first, second = await passes_of_both(client)
    await drafter.stop()
    for name, answer in zip(CHOICES, answers, strict=True):
        assert answer.token_ids == alone[name].token_ids, name
    assert sum(answer.stats.drafted for answer in answers) > 0
    assert first.passes == second.passes > 0
    assert first.pid != second.pid


async def test_log_probabilities_are_those_of_whole_rows(
    folder: Path, shards: ShardProcesses
) -> None:
    """Sums over ranks have other last bits than one rank's, and the same with drafts as without."""
    asked = GenerateOptions(
        temperature=0.8, seed=5, max_tokens=30, ignore_eos=True, logprobs=3, prompt_logprobs=2
    )
    target = await start_target(folder)
    async with client_of(folder, (target.address,)) as client:
        alone = await client.generate(PROMPT, asked)
    await target.stop()
    drafter = await start_drafter(folder)
    async with client_of(folder, shards.addresses, {"drafter-0": drafter.address}) as client:
        drafted = await client.generate(PROMPT, replace(asked, policy="lockstep"))
        plain = await client.generate(PROMPT, replace(asked, policy="off"))
    await drafter.stop()
    assert drafted.stats.accepted > 0
    assert drafted.logprobs == plain.logprobs
    assert drafted.prompt_logprobs == plain.prompt_logprobs
    assert plain.token_ids == alone.token_ids
    pairs = [
        *zip(plain.prompt_logprobs[1:], alone.prompt_logprobs[1:], strict=True),
        *zip(plain.logprobs, alone.logprobs, strict=True),
    ]
    for one, other in pairs:
        assert one.top_ids == other.top_ids
        assert one.logprob == pytest.approx(other.logprob, abs=2e-5)
        assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=2e-5)


@pytest.mark.parametrize("rank", [1, *at_release([0])])
async def test_a_killed_rank_costs_a_pause(folder: Path, shards: ShardProcesses, rank: int) -> None:
    options = GenerateOptions(temperature=1.0, seed=3, max_tokens=200, ignore_eos=True)
    async with client_of(folder, shards.addresses) as client:
        plain = await client.generate(PROMPT, options)
        token_ids: list[int] = []
        restarting: asyncio.Task[None] | None = None
        async for event in client.stream(PROMPT, options):
            if isinstance(event, Chunk):
                token_ids += event.token_ids
            if restarting is None and len(token_ids) >= 50:
                shards.kill(rank)
                restarting = asyncio.create_task(asyncio.to_thread(shards.restart, rank))
        assert restarting is not None
        await restarting
    assert tuple(token_ids) == plain.token_ids
    assert all(process.poll() is None for process in shards.processes)


async def test_a_rank_that_hangs_is_an_error_in_time_and_no_hang(folder: Path) -> None:
    """Rank 1 is stopped for longer than a collective may last. Rank 0 ends its stream meanwhile."""
    options = GenerateOptions(temperature=1.0, seed=3, max_tokens=200, ignore_eos=True)
    with ShardProcesses([folder, folder], collective_seconds=2.0) as shards:
        async with client_of(folder, shards.addresses) as client:
            plain = await client.generate(PROMPT, options)
            token_ids: list[int] = []
            resuming: asyncio.Task[None] | None = None
            async for event in client.stream(PROMPT, options):
                if isinstance(event, Chunk):
                    token_ids += event.token_ids
                if resuming is None and len(token_ids) >= 50:
                    shards.processes[1].send_signal(signal.SIGSTOP)
                    resuming = asyncio.create_task(resume_after(shards, 1, 6.0))
            assert resuming is not None
            await resuming
            stats = await client.stats()
    assert tuple(token_ids) == plain.token_ids
    assert next(one for one in stats.workers if one.name == "shard-0").reconnects > 0


async def resume_after(shards: ShardProcesses, rank: int, seconds: float) -> None:
    await asyncio.sleep(seconds)
    shards.processes[rank].send_signal(signal.SIGCONT)


async def test_shards_that_get_different_steps_end_their_streams(shards: ShardProcesses) -> None:
    async with open_channel(shards.addresses[0]) as first, open_channel(shards.addresses[1]) as two:
        stubs = [target_pb2_grpc.TargetServiceStub(channel) for channel in (first, two)]
        description = await stubs[0].DescribeTarget(
            target_pb2.DescribeTargetRequest(), timeout=DEADLINE
        )
        identity = DriverIdentity()

        async def meet(stub: Any) -> None:
            hello = (await hello_to_shard(stub, identity)).hello
            meeting = target_pb2.MeetRequest(
                session="out of step", rendezvous=description.rendezvous, hello=hello
            )
            await stub.Meet(meeting, timeout=DEADLINE)

        await asyncio.gather(*map(meet, stubs))
        calls = [open_stream(stub.Step) for stub in stubs]
        for call, stub in zip(calls, stubs, strict=True):
            await call.write(await hello_to_shard(stub, identity))
        await calls[0].write(target_pb2.StepRequest(step=1))
        await calls[1].write(target_pb2.StepRequest(step=1, close=[5]))
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "the shards are out of step" in str(caught.value.details())


async def test_a_step_without_a_meeting_is_refused(shards: ShardProcesses) -> None:
    async with open_channel(shards.addresses[1]) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        call = open_stream(stub.Step)
        await call.write(await hello_to_shard(stub))
        await call.write(target_pb2.StepRequest(step=1))
        with pytest.raises(grpc.aio.AioRpcError, match="have not met"):
            await call.read()


async def test_shards_of_different_checkpoints_are_refused(folder: Path, tmp_path: Path) -> None:
    other = make_tiny_checkpoint(tmp_path / "other", num_layers=1)
    with ShardProcesses([folder, other]) as shards:
        with pytest.raises(CheckpointError, match=r"differ in their checkpoint.*rank 1"):
            async with client_of(folder, shards.addresses):
                pass
        async with client_of_single(shards.addresses[1]) as answer:
            assert (answer.rank, answer.tensor_parallel) == (1, 2)


@asynccontextmanager
async def client_of_single(address: str) -> AsyncIterator[target_pb2.DescribeTargetResponse]:
    async with open_channel(address) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        yield await stub.DescribeTarget(target_pb2.DescribeTargetRequest(), timeout=DEADLINE)

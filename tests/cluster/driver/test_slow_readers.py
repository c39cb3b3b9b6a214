"""Callers that do not read, or ask for too much at once: what they cost the driver and others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, Literal

import grpc
import pytest

from cluster.driver import generation, many_requests
from cluster.driver.driver import SHORT_PROMPT_CHARACTERS, Driver
from paceline import AsyncClient, Completion, GenerateOptions
from paceline.errors import OverloadedError
from paceline.generation import CompletionBuilder
from paceline.v1 import inference_pb2, inference_pb2_grpc, trace_pb2, trace_pb2_grpc
from paceline.wire.requests import request_to_wire
from tests.cluster.fast_target import (
    driver_process,
    fast_system,
    fast_target,
    token_at,
)
from tests.cluster.system import Checkpoints, eventually, make_checkpoints, running_system
from tests.release import at_release
from tests.workers.grpc_peers import END

pytestmark = pytest.mark.long

SMALL_WINDOWS = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
"""Options of a client that takes little before it reads."""

MAX_MEGABYTES = 300
"""Bound for 1,000 requests: 32 KiB on the wire are some 150 KB in Python, a gRPC call 60 KB."""

PROMPT = "The quick brown fox"
LONG = GenerateOptions(temperature=0.0, max_tokens=2000, ignore_eos=True, policy="off")
ENDLESS = replace(LONG, max_tokens=100_000)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return make_checkpoints(tmp_path_factory.mktemp("readers"))


@asynccontextmanager
async def unread_stub(address: str) -> AsyncIterator[inference_pb2_grpc.InferenceServiceAsyncStub]:
    """A stub whose calls take almost nothing before they are read."""
    async with grpc.aio.insecure_channel(address, options=SMALL_WINDOWS) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


def _begin(number: int, options: GenerateOptions = LONG) -> inference_pb2.GenerateManyRequest:
    return inference_pb2.GenerateManyRequest(number=number, begin=request_to_wire(PROMPT, options))


def _is_right(completion: Completion) -> bool:
    """Whether the text is that of the fast target."""
    first = len(completion.prompt_token_ids)
    expected = [token_at(first + index) for index in range(len(completion.token_ids))]
    return list(completion.token_ids) == expected


@pytest.mark.parametrize("method", ["GenerateMany", *at_release(["Generate"])])
async def test_memory_stays_flat_over_1000_requests_that_nobody_reads(
    checkpoints: Checkpoints, method: Literal["Generate", "GenerateMany"]
) -> None:
    """A bystander that reads gets its text. The others end, and learn why if they read later."""
    async with (
        fast_target(checkpoints.target) as (_, target),
        driver_process(checkpoints.target, target.address, max_unread_seconds=5) as driver,
        AsyncClient(driver.address) as client,
        unread_stub(driver.address) as stub,
    ):
        assert _is_right(await client.generate(PROMPT, LONG, max_tokens=500))
        begun = asyncio.Event()
        reading = asyncio.create_task(_read(client.stream(PROMPT, LONG), begun))
        await begun.wait()
        before = driver.megabytes
        if method == "Generate":
            calls: list[Any] = [
                stub.Generate(request_to_wire(PROMPT, ENDLESS)) for _ in range(1000)
            ]
        else:
            calls = [stub.GenerateMany(None)]
            for number in range(1000):
                await calls[0].write(_begin(number, ENDLESS))
        peak = before
        async with asyncio.timeout(500):
            while (await client.stats()).requests_finished < 1 + 1000:
                peak = max(peak, driver.megabytes)
                assert peak - before < MAX_MEGABYTES, "the driver's memory grows"
                await asyncio.sleep(0.2)
            completion = await reading
            assert len(completion.token_ids) == 2000
            assert _is_right(completion)
            if method == "Generate":
                await _expect_reason(calls[0])
            else:
                await _expect_reasons(calls[0], 1000)


async def _read(events: Any, begun: asyncio.Event | None = None) -> Completion:
    """Read all events. `begun` is set with the first."""
    builder = CompletionBuilder()
    async for event in events:
        if begun is not None:
            begun.set()
        builder.add(event)
    return builder.build()


async def _expect_reason(call: Any) -> None:
    """Expect the beginning of a text, then RESOURCE_EXHAUSTED."""
    offset = 0
    with suppress(grpc.aio.AioRpcError):
        async for response in call:
            assert response.chunk.offset == offset
            offset += len(response.chunk.token_ids)
    assert 0 < offset < 2000
    assert await call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "bytes of the answer unread for 5 s" in await call.details()


async def _expect_reasons(call: Any, count: int) -> None:
    async for message in call:
        for answer in message.responses:
            if answer.HasField("failed"):
                assert answer.failed.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
                assert "bytes of the answer unread for 5 s" in answer.failed.details
                count -= 1
        if not count:
            return


async def test_a_paused_request_goes_on_with_the_same_text(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile no other request waits for it, though there is only one place."""
    monkeypatch.setattr(generation, "MAX_UNREAD_BYTES", 4000)
    options = GenerateOptions(temperature=1.0, seed=5, max_tokens=300, ignore_eos=True, window=4)
    async with running_system(
        checkpoints, drafters={"d": checkpoints.drafter}, max_num_seqs=1
    ) as system:
        plain = await system.client.generate(PROMPT, options, policy="off")
        unread = await system.driver.submit(PROMPT, options)
        paused = system.driver.scheduler._state.paused
        await eventually(lambda: unread.samples[0].sequence_id in paused)
        system.driver.scheduler.check_integrity()
        assert (await system.client.generate(PROMPT, options)).token_ids == plain.token_ids
        assert unread.samples[0].sequence_id in paused
        completion = await _read(unread)
        assert (completion.token_ids, completion.text) == (plain.token_ids, plain.text)
        await system.settle()


async def test_a_stream_that_is_not_read_pauses_nobody_else(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "MAX_UNREAD_BYTES", 4000)
    async with (
        fast_system(checkpoints.target) as (driver, server, _),
        AsyncClient(server.address) as client,
        unread_stub(server.address) as stub,
    ):
        bystander = asyncio.create_task(client.generate(PROMPT, LONG))
        await eventually(lambda: driver.scheduler.num_running == 1)
        call: Any = stub.GenerateMany(None)
        for number in range(20):
            await call.write(_begin(number))
        paused = driver.scheduler._state.paused
        await eventually(lambda: len(paused) == 20)
        assert _is_right(await bystander)
        call.cancel()
        await eventually(lambda: driver.scheduler.num_waiting == 0)
        driver.scheduler.check_integrity()


async def test_requests_beyond_what_a_stream_may_have_are_refused_each_by_itself(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many_requests, "MAX_REQUESTS_PER_STREAM", 3)
    async with (
        fast_system(checkpoints.target) as (driver, server, target),
        unread_stub(server.address) as stub,
    ):
        target.gate.clear()
        call: Any = stub.GenerateMany(None)
        short = GenerateOptions(max_tokens=5, ignore_eos=True)
        for number in range(8):
            await call.write(_begin(number, short))
        scheduler = driver.scheduler
        await eventually(lambda: scheduler.num_running + scheduler.num_waiting == 3)
        target.gate.set()
        finished, refused = await _ends_of(call, 8)
        assert finished == [0, 1, 2]
        assert sorted(refused) == [3, 4, 5, 6, 7]
        assert all("3 requests run on this stream" in one for one in refused.values())
        await call.write(_begin(9, short))
        assert await _ends_of(call, 1) == ([9], {})
        call.cancel()


async def _ends_of(call: Any, count: int) -> tuple[list[int], dict[int, str]]:
    """The numbers of finished requests, and the errors of failed ones, until `count` have ended."""
    finished: list[int] = []
    failed: dict[int, str] = {}
    while len(finished) + len(failed) < count:
        for answer in (await call.read()).responses:
            if answer.HasField("failed"):
                failed[answer.number] = answer.failed.details
            elif answer.response.HasField("finished"):
                finished.append(answer.number)
    return sorted(finished), failed


async def test_who_floods_a_stream_and_reads_no_refusal_is_heard_no_more(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refusals do not pile up. All are delivered once they are read."""
    monkeypatch.setattr(many_requests, "MAX_REQUESTS_PER_STREAM", 1)
    monkeypatch.setattr(many_requests, "MAX_UNSENT_REFUSALS", 8)
    monkeypatch.setattr(many_requests, "USUAL_BYTES", 1)
    streams: list[many_requests.ManyRequests] = []
    begin = many_requests.ManyRequests.serve

    async def serve(stream: many_requests.ManyRequests, requests: Any) -> None:
        streams.append(stream)
        await begin(stream, requests)

    monkeypatch.setattr(many_requests.ManyRequests, "serve", serve)
    async with (
        fast_system(checkpoints.target) as (_, server, target),
        unread_stub(server.address) as stub,
    ):
        target.gate.clear()
        call: Any = stub.GenerateMany(None)
        for number in range(200):
            await call.write(_begin(number))
        await eventually(lambda: bool(streams) and streams[0]._num_refusals == 8)
        _, refused = await _ends_of(call, 199)
        assert sorted(refused) == list(range(1, 200))
        call.cancel()


async def test_what_waits_to_be_tokenized_counts_as_waiting(checkpoints: Checkpoints) -> None:
    """A caller that goes away frees its place at once."""
    long = "The quick brown fox jumps over the lazy dog. " * 50_000
    async with (
        fast_system(checkpoints.target, max_num_seqs=1, max_waiting=2) as (driver, server, _),
        AsyncClient(server.address) as client,
    ):
        bystander = asyncio.create_task(client.generate(PROMPT, LONG))
        await eventually(lambda: driver.scheduler.num_running == 1)
        asked = [asyncio.create_task(_begun(driver, long)) for _ in range(2)]
        await eventually(lambda: driver._num_arriving == 2)
        with pytest.raises(OverloadedError, match=r"2 requests are waiting.*server\.max_waiting"):
            await driver.submit(PROMPT, LONG)
        asked[1].cancel()
        await asyncio.wait([asked[1]])
        assert not asked[0].done(), "the first was still to be tokenized"
        (await driver.submit(PROMPT, LONG)).cancel()
        asked[0].cancel()
        assert _is_right(await bystander)


async def _begun(driver: Driver, prompt: str) -> None:
    (await driver.submit(prompt, LONG)).cancel()


@pytest.mark.timing
async def test_a_long_prompt_holds_up_neither_short_ones_nor_the_loop(
    checkpoints: Checkpoints,
) -> None:
    long = "The quick brown fox jumps over the lazy dog. " * 30_000
    assert len(long) > SHORT_PROMPT_CHARACTERS
    async with (
        fast_system(checkpoints.target) as (driver, server, _),
        AsyncClient(server.address) as client,
    ):
        asked = [asyncio.create_task(_begun(driver, long)) for _ in range(3)]
        await eventually(lambda: driver._num_arriving == 3)
        turns = 0
        while not asked[0].done():
            await asyncio.sleep(0.001)
            turns += 1
        assert turns > 20, "the event loop stood still"
        assert _is_right(await client.generate(PROMPT, LONG, max_tokens=20))
        assert not asked[2].done()
        await asyncio.gather(*asked)


async def test_a_tracer_that_does_not_read_is_left(checkpoints: Checkpoints) -> None:
    """Only a bounded amount is kept for it. It learns why when it reads."""
    async with (
        fast_system(checkpoints.target) as (driver, server, _),
        AsyncClient(server.address) as client,
        grpc.aio.insecure_channel(server.address, options=SMALL_WINDOWS) as channel,
    ):
        bystander = asyncio.create_task(client.generate(PROMPT, LONG))
        call: Any = trace_pb2_grpc.TraceServiceStub(channel).Trace(trace_pb2.TraceRequest())
        assert (await call.read()).HasField("begun")
        others = [asyncio.create_task(client.generate(PROMPT, LONG)) for _ in range(60)]
        await eventually(lambda: not driver._dispatch.taps, 120)
        assert _is_right(await bystander)
        assert all(map(_is_right, await asyncio.gather(*others)))
        with suppress(grpc.aio.AioRpcError):
            while await call.read() is not END:
                pass
        assert await call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "bytes of messages unread" in await call.details()

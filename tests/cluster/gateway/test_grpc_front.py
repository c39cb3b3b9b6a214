"""The gateway's gRPC: calls through it are those of a driver, and a lost driver is replaced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.gateway import drivers
from cluster.gateway.drivers import DriverPool
from cluster.gateway.grpc_front import SERVICES, serve_grpc
from paceline import AsyncClient, Client, Retries
from paceline.channel import caller_options
from paceline.chat import Message
from paceline.errors import InvalidRequestError, PacelineError, UnavailableError
from paceline.generation import Chunk, Finished, Started
from paceline.options import OptionFields
from paceline.v1 import inference_pb2, inference_pb2_grpc, trace_pb2, trace_pb2_grpc
from tests.cluster.system import HOST, Checkpoints, System, eventually, running_system
from workers.process.server import start_server

LONG: OptionFields = {"max_tokens": 120, "ignore_eos": True, "seed": 5}


@pytest_asyncio.fixture
async def system(checkpoints: Checkpoints) -> AsyncIterator[System]:
    async with running_system(checkpoints) as system:
        yield system


@asynccontextmanager
async def _front(*addresses: str) -> AsyncIterator[str]:
    """The address of a gateway's gRPC server."""
    async with DriverPool(addresses) as pool:
        server = await serve_grpc(pool, host=HOST)
        try:
            yield server.address
        finally:
            await server.stop()


@asynccontextmanager
async def _stub(address: str) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(address, options=caller_options(address)) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


async def test_every_rpc_of_a_driver_passes_through(system: System) -> None:
    async with _front(system.server.address) as address, AsyncClient(address) as client:
        assert await client.describe() == await system.client.describe()
        assert (await client.stats()).workers[0].name == "shard-0"
        chat = [Message("user", "sea")]
        for given in ("sea", chat, [5, 6, 7]):
            told = await client.generate(given, **LONG)
            assert told.token_ids == (await system.client.generate(given, **LONG)).token_ids
        async with _stub(address) as stub:
            request = inference_pb2.GenerateRequest(prompt="sea", max_tokens=4, seed=1)
            answers = [one async for one in stub.Generate(request)]
            direct = await system.client.generate("sea", max_tokens=4, seed=1)
            ids = [i for one in answers for i in one.chunk.token_ids]
            assert tuple(ids) == tuple(direct.token_ids)
        async with grpc.aio.insecure_channel(address) as channel:
            traced: Any = trace_pb2_grpc.TraceServiceStub(channel).Trace(trace_pb2.TraceRequest())
            assert (await traced.read()).begun.model == "target"
            traced.cancel()
            told = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=SERVICES[0].full_name)
            )
            assert told.status == health_pb2.HealthCheckResponse.SERVING


async def test_all_samples_pass_through(system: System) -> None:
    options: OptionFields = {**LONG, "max_tokens": 30, "temperature": 1.0}
    expected = await system.client.generate("sea", samples=3, **options)
    assert len({one.token_ids for one in expected}) == 3
    async with _front(system.server.address) as address, AsyncClient(address) as client:
        told = await client.generate("sea", samples=3, **options)
        assert [one.token_ids for one in told] == [one.token_ids for one in expected]
        with Client(address) as blocking:
            told = await asyncio.to_thread(lambda: blocking.generate("sea", samples=3, **options))
        assert [one.token_ids for one in told] == [one.token_ids for one in expected]
    await system.settle()


async def test_errors_pass_through_with_their_fields(system: System) -> None:
    async with (
        _front(system.server.address) as address,
        AsyncClient(address) as client,
        _stub(address) as stub,
    ):
        for call in (client.generate("sea", policy="none"), _whole(stub, policy="none")):
            with pytest.raises((InvalidRequestError, grpc.aio.AioRpcError)) as raised:
                await call
            error = raised.value
            if isinstance(error, InvalidRequestError):
                assert error.field == "policy"
            else:
                assert isinstance(error, grpc.aio.AioRpcError)
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                trailing: Any = error.trailing_metadata()
                assert dict(trailing)["paceline-field"] == "policy"
        # Bytes that are no message.
        many = stub.GenerateMany(None)
        await many.write(inference_pb2.GenerateManyRequest(number=1))
        with pytest.raises(grpc.aio.AioRpcError, match="expected begin or cancel"):
            await many.read()
        # A stream of the caller's that is wrong does not touch another one.
        assert (await client.generate("sea", **LONG)).finish_reason == "length"


async def _whole(stub: Any, **fields: Any) -> list[Any]:
    request = inference_pb2.GenerateRequest(prompt="sea", **fields)
    return [one async for one in stub.Generate(request)]


async def test_cancelling_reaches_the_driver(system: System) -> None:
    async with _front(system.server.address) as address, _stub(address) as stub:
        request = inference_pb2.GenerateRequest(prompt="sea", max_tokens=120, ignore_eos=True)
        call = stub.Generate(request)
        await call.read()
        call.cancel()
        await system.settle()
        async with AsyncClient(address) as client:
            events = client.stream("sea", **LONG)
            assert isinstance(await anext(events), Started)
            assert isinstance(await anext(events), Chunk)
            await events.aclose()
            await system.settle()


async def test_a_deadline_is_the_drivers_too() -> None:
    """And the caller's key arrives as it was sent, and trailing metadata comes back."""
    seen: list[tuple[dict[str, Any], float | None]] = []

    class Servicer(inference_pb2_grpc.InferenceServiceServicer):
        async def DescribeModel(self, request: Any, context: Any) -> Any:
            seen.append((dict(context.invocation_metadata()), context.time_remaining()))
            context.set_trailing_metadata((("paceline-note", "kept"),))
            return inference_pb2.DescribeModelResponse(model="m")

    def add(server: grpc.aio.Server) -> list[str]:
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(Servicer(), server)
        return [SERVICES[0].full_name]

    server = await start_server(add, host=HOST)
    try:
        async with _front(server.address) as address, _stub(address) as stub:
            seen.clear()
            call = stub.DescribeModel(
                inference_pb2.DescribeModelRequest(),
                timeout=20,
                metadata=(("authorization", "Bearer k"), ("grpc-accept-encoding", "no")),
            )
            assert (await call).model == "m"
            assert dict(await call.trailing_metadata())["paceline-note"] == "kept"
            metadata, seconds = seen[0]
            assert metadata["authorization"] == "Bearer k"
            assert seconds is not None
            assert 10 < seconds < 21
    finally:
        await server.stop()


async def test_requests_are_divided_and_a_lost_driver_ends_only_its_own(
    checkpoints: Checkpoints, system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drivers, "LOOK_SECONDS", 30.0)
    async with (
        running_system(checkpoints) as other,
        _front(system.server.address, other.server.address) as address,
        AsyncClient(address, retries=Retries(0)) as client,
    ):
        both = [system.driver, other.driver]
        expected = (await system.client.generate("sea", **LONG)).token_ids
        streams = [asyncio.create_task(client.generate("sea", **LONG)) for _ in range(4)]
        await eventually(lambda: sum(one.scheduler.num_running for one in both) == 4)
        assert [one.scheduler.num_running for one in both] == [2, 2]
        assert {tuple(one.token_ids) for one in await asyncio.gather(*streams)} == {tuple(expected)}
        # One driver is lost in the middle: its requests fail, those of the other go on.
        before = [one.stats().committed_tokens for one in both]
        streams = [asyncio.create_task(client.generate("sea", **LONG)) for _ in range(4)]
        await eventually(
            lambda: all(
                one.stats().committed_tokens > least + 20
                for one, least in zip(both, before, strict=True)
            )
        )
        await other.server.stop()
        ended = await asyncio.gather(*streams, return_exceptions=True)
        lost = [one for one in ended if isinstance(one, PacelineError)]
        assert all(isinstance(one, UnavailableError) for one in lost)
        assert len(lost) == 2
        # The next ones go to the other driver, on the same stream of the caller.
        assert (await client.generate("sea", **LONG)).token_ids == expected
        await system.settle()


async def test_a_client_resumes_through_it_what_a_lost_driver_had(
    checkpoints: Checkpoints, system: System
) -> None:
    async with (
        running_system(checkpoints) as other,
        _front(system.server.address, other.server.address) as address,
        AsyncClient(address) as client,
    ):
        expected = await system.client.generate("sea", **LONG)
        streams = [asyncio.create_task(client.generate("sea", **LONG)) for _ in range(2)]
        await eventually(lambda: other.driver.stats().committed_tokens > 20)
        await other.server.stop()
        for one in await asyncio.gather(*streams):
            assert (one.token_ids, one.text) == (expected.token_ids, expected.text)


async def test_a_request_without_tokens_moves_when_its_driver_drains(
    checkpoints: Checkpoints, system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway has not noticed yet that the driver takes no more requests."""
    monkeypatch.setattr(drivers, "LOOK_SECONDS", 30.0)
    async with (
        running_system(checkpoints) as other,
        _front(system.server.address, other.server.address) as address,
        AsyncClient(address, retries=Retries(0)) as client,
        _stub(address) as stub,
    ):
        await system.driver.drain(0)
        events = [event async for event in client.stream("sea", **LONG)]
        assert [isinstance(one, Started) for one in events].count(True) == 1
        assert isinstance(events[-1], Finished)
        request = inference_pb2.GenerateRequest(prompt="sea", max_tokens=4)
        answers = [one async for one in stub.Generate(request)]
        assert [one.HasField("started") for one in answers].count(True) == 1
        await other.driver.drain(0)
        with pytest.raises(UnavailableError):
            await client.generate("sea", **LONG)


async def test_without_a_driver_calls_end_and_health_says_so(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drivers, "LOOK_SECONDS", 0.2)
    async with (
        _front(system.server.address) as address,
        grpc.aio.insecure_channel(address) as channel,
        AsyncClient(address, retries=Retries(0)) as client,
    ):
        await client.connect()
        await system.server.stop()
        with pytest.raises(UnavailableError):
            await client.generate("sea")
        with pytest.raises(UnavailableError, match="no driver serves yet"):
            await client.describe()
        async with asyncio.timeout(60):
            while True:
                told = await health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest()
                )
                if told.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                    break
                await asyncio.sleep(0.05)

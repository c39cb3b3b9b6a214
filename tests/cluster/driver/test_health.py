"""What the health service says of a driver, and to whom."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.driver.driver import DriverOptions
from cluster.driver.service import SERVICE_NAME, TRACE_SERVICE, serve_driver
from paceline import channel as paceline_channel
from paceline.channel import MAX_METADATA_BYTES, MAX_STREAMS_PER_CONNECTION
from paceline.v1 import inference_pb2, inference_pb2_grpc, target_pb2
from tests.cluster.fast_target import FastTarget, fast_system
from tests.cluster.hostile import serve_false_target
from tests.cluster.interruptions import OPTIONS, PROMPT, plain_answer, port_of
from tests.cluster.system import (
    HOST,
    Checkpoints,
    eventually,
    make_checkpoints,
    running_system,
    start_target,
)
from tests.held_ports import held_port
from workers.engine.load.checkpoint import inspect_checkpoint
from workers.target.stepper import Stepper

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
ALONE = [("grpc.use_local_subchannel_pool", 1)]
"""Options of a channel that shares its connection with no other."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return make_checkpoints(tmp_path_factory.mktemp("health"))


async def _told(call: Any) -> int:
    """The next status of a watch."""
    status: int = (await asyncio.wait_for(call.read(), 60)).status
    return status


@pytest.mark.parametrize("service", ["", SERVICE_NAME, TRACE_SERVICE])
async def test_it_follows_the_target(checkpoints: Checkpoints, service: str) -> None:
    """The target is lost and comes back while a request runs. Then the driver is drained."""
    request = health_pb2.HealthCheckRequest(service=service)
    async with (
        running_system(checkpoints, target_rtt_ms=10) as system,
        grpc.aio.insecure_channel(system.server.address) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        watch: Any = stub.Watch(request)
        assert await _told(watch) == (await stub.Check(request)).status == SERVING
        plain = await plain_answer(system)
        bystander = asyncio.create_task(system.client.generate(PROMPT, OPTIONS))
        await eventually(lambda: system.driver.scheduler.num_running == 1)
        port = port_of(system.target.address)
        await system.target.stop()
        assert await _told(watch) == (await stub.Check(request)).status == NOT_SERVING
        restarted = await start_target(checkpoints.target, port=port)
        try:
            assert await _told(watch) == (await stub.Check(request)).status == SERVING
            assert (await bystander).token_ids == plain.token_ids
            assert await system.driver.drain(0) == 0
            assert await _told(watch) == NOT_SERVING
            watch.cancel()
        finally:
            await restarted.stop()


async def test_a_shard_says_that_its_steps_fail(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so until one succeeds. The request of the failed step is tried again."""
    async with (
        running_system(checkpoints) as system,
        grpc.aio.insecure_channel(system.target.address) as channel,
    ):
        plain = await plain_answer(system)
        watch: Any = health_pb2_grpc.HealthStub(channel).Watch(_asked())
        assert await _told(watch) == SERVING
        right, broken = Stepper.step, asyncio.Event()

        def step(stepper: Stepper, request: target_pb2.StepRequest) -> target_pb2.StepResponse:
            if request.step > 20 and not broken.is_set():
                broken.set()
                raise RuntimeError("injected: the device is broken")
            return right(stepper, request)

        monkeypatch.setattr(Stepper, "step", step)
        answer = asyncio.create_task(system.client.generate(PROMPT, OPTIONS, policy="off"))
        assert await _told(watch) == NOT_SERVING
        assert await _told(watch) == SERVING
        assert (await answer).token_ids == plain.token_ids
        watch.cancel()


async def test_it_serves_only_once_the_target_is_there(checkpoints: Checkpoints) -> None:
    """The driver is asked while it looks for its target."""
    digest = inspect_checkpoint(checkpoints.target).vocabulary_digest
    with held_port() as target_port, held_port() as port:
        options = DriverOptions(checkpoints.target, (f"{HOST}:{target_port}",), connect_seconds=120)
        starting = asyncio.create_task(serve_driver(options, host=HOST, port=port))
        async with grpc.aio.insecure_channel(f"{HOST}:{port}") as channel:
            watch: Any = health_pb2_grpc.HealthStub(channel).Watch(_asked(), wait_for_ready=True)
            assert await _told(watch) == NOT_SERVING
            target = await serve_false_target(FastTarget(digest), port=target_port)
            _, server = await starting
            assert await _told(watch) == SERVING
            await server.stop()
            await target.stop()


async def test_one_who_watches_and_does_not_read_holds_up_nobody(checkpoints: Checkpoints) -> None:
    """Its flow-control window is closed from the first byte on, so it takes nothing at all."""
    closed = [("grpc.http2.lookahead_bytes", 0), ("grpc.http2.bdp_probe", 0)]
    async with (
        fast_system(checkpoints.target) as (_, server, _),
        grpc.aio.insecure_channel(server.address, options=closed) as hostile,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        unread = [health_pb2_grpc.HealthStub(hostile).Watch(_asked()) for _ in range(10)]
        watch: Any = health_pb2_grpc.HealthStub(channel).Watch(_asked())
        assert await _told(watch) == SERVING
        for _ in range(20):  # Watchers hear of each change.
            server.report(serving=False)
            assert await _told(watch) == NOT_SERVING
            server.report(serving=True)
            assert await _told(watch) == SERVING
        for one in (*unread, watch):
            one.cancel()


def _asked() -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest()


async def test_a_connection_has_so_many_calls_and_its_others_wait(checkpoints: Checkpoints) -> None:
    """Calls of another connection are answered meanwhile.

    What they are told does not count: with so many calls in this process, a busy host may be late
    with the pings between driver and target.
    """
    async with (
        fast_system(checkpoints.target) as (_, server, _),
        grpc.aio.insecure_channel(server.address, options=ALONE) as greedy,
        grpc.aio.insecure_channel(server.address, options=ALONE) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(greedy)
        watches: list[Any] = [stub.Watch(_asked()) for _ in range(MAX_STREAMS_PER_CONNECTION)]
        assert {await _told(watch) for watch in watches} <= {SERVING, NOT_SERVING}
        waiting: Any = stub.Check(_asked())
        await health_pb2_grpc.HealthStub(channel).Check(_asked(), timeout=60)
        assert not waiting.done()
        watches[0].cancel()
        assert (await waiting).status in (SERVING, NOT_SERVING)
        for watch in watches:
            watch.cancel()


async def test_a_server_has_so_many_connections(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A further connection is refused, and accepted once another one has ended."""
    monkeypatch.setattr(paceline_channel, "MAX_CONNECTIONS", 2)
    async with fast_system(checkpoints.target) as (_, server, _), AsyncExitStack() as stack:

        async def connect() -> grpc.aio.Channel:
            channel = grpc.aio.insecure_channel(server.address, options=ALONE)
            return await stack.enter_async_context(channel)

        first, second = await connect(), await connect()
        for channel in (first, second):
            status = (await health_pb2_grpc.HealthStub(channel).Check(_asked())).status
            assert status == SERVING
        late = health_pb2_grpc.HealthStub(await connect())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await late.Check(_asked())
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        await first.close(None)
        status = (await late.Check(_asked(), wait_for_ready=True, timeout=60)).status
        assert status == SERVING


async def test_long_metadata_ends_its_call_alone(checkpoints: Checkpoints) -> None:
    async with (
        fast_system(checkpoints.target) as (_, server, _),
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        describe: Any = stub.DescribeModel
        long = (("x-long", "a" * 3 * MAX_METADATA_BYTES),)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await describe(inference_pb2.DescribeModelRequest(), metadata=long)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await describe(inference_pb2.DescribeModelRequest())).model == "hung"

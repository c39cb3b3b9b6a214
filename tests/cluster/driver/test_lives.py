"""Drivers and workers that start again, or take each other's place: real ones, over gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import grpc
import pytest

from cluster.driver.driver import Driver, DriverOptions
from paceline.errors import UnavailableError, VersionMismatchError
from paceline.sampling import SamplingParams, SequenceSpec
from paceline.v1 import drafting_pb2, drafting_pb2_grpc, target_pb2, target_pb2_grpc, types_pb2
from paceline.wire.sequences import spec_to_wire
from tests.cluster.builds import minor_version
from tests.cluster.bystanders import bystander
from tests.cluster.hostile import LyingDrafter, serve_lying_drafter
from tests.cluster.interruptions import OPTIONS, PROMPT, interrupted, plain_answer
from tests.cluster.system import (
    HOST,
    Checkpoints,
    System,
    eventually,
    make_checkpoints,
    running_system,
    start_drafter,
)
from tests.held_ports import held_port
from tests.workers.grpc_peers import (
    DEADLINE,
    DraftStream,
    call_of_bytes,
    hello_to_drafter,
    open_channel,
)
from workers.drafting.desk import DraftingDesk
from workers.drafting.drafter import serve_once_loaded
from workers.drafting.kinds.ngram import NgramProposer
from workers.drafting.service import Drafter
from workers.process.handshake import DriverIdentity, Reception, own_version, with_life
from workers.process.server import RunningServer

SOON = 20.0


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return make_checkpoints(tmp_path_factory.mktemp("lives"))


def told(server: RunningServer) -> str:
    """The address of a worker with its life, as placement tells it."""
    assert server.life is not None
    return with_life(server.address, server.life)


def trouble(driver: Driver, worker: str) -> str:
    return next(one.trouble for one in driver.stats().workers if one.name == worker)


async def start_versioned_drafter(version: str) -> RunningServer:
    """A real n-gram drafter that says that it runs another version."""
    drafter = Drafter(reception=Reception("drafter", version=version))

    async def load() -> None:
        drafter.begin(DraftingDesk(NgramProposer(), max_sequences=8))

    return await serve_once_loaded(drafter, load, host=HOST, port=0)


@asynccontextmanager
async def second_driver(system: System, **options: Any) -> AsyncIterator[Driver]:
    """Another driver of the same target, which has not started."""
    wanted = DriverOptions(
        folder=system.driver._options.folder,
        target_addresses=(system.target.address,),
        connect_seconds=3.0,
    )
    driver = Driver(replace(wanted, **options))
    try:
        yield driver
    finally:
        await driver.stop()


async def test_a_drafter_that_took_over_the_port_is_not_used_before_the_driver_is_told_of_it(
    checkpoints: Checkpoints,
) -> None:
    with held_port() as port:
        first = await start_drafter(None, port=port)
        async with running_system(checkpoints) as system:
            drivers = {"drafter-0": told(first)}
            await system.driver.set_drafters(drivers)
            await eventually(lambda: "drafter-0" in system.connected())
            plain = await plain_answer(system)
            second: list[RunningServer] = []

            async def replace_it() -> None:
                await first.stop()
                second.append(await start_drafter(None, port=port))

            answer, _ = await interrupted(system, OPTIONS, replace_it)
            assert answer.token_ids == plain.token_ids
            assert second[0].address == first.address
            assert second[0].life != first.life
            await eventually(lambda: "has the life" in trouble(system.driver, "drafter-0"), SOON)
            why = trouble(system.driver, "drafter-0")
            assert f"this drafter has the life {second[0].life:x}" in why
            assert f"means the life {first.life:x} of 'drafter-0'" in why
            assert "drafter-0" not in system.connected()
            await system.driver.set_drafters({"drafter-0": told(second[0])})
            await eventually(lambda: "drafter-0" in system.connected(), SOON)
            again, _ = await interrupted(system, OPTIONS)
            assert again.token_ids == plain.token_ids
            await system.settle()
            await second[0].stop()


@pytest.mark.timing
async def test_a_new_life_of_a_driver_takes_the_shard_and_the_old_one_stays_refused(
    checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    """The old driver is as one whose host was cut off: it goes on, and knows nothing of the new."""
    async with running_system(checkpoints, identity=DriverIdentity("it", 1)) as system:
        plain = await plain_answer(system)
        async with second_driver(system, identity=DriverIdentity("it", 2)) as new:
            old = asyncio.create_task(system.client.generate(PROMPT, OPTIONS))
            await eventually(lambda: system.driver.scheduler.num_running == 1)
            began = time.monotonic()
            await new.start()
            assert time.monotonic() - began < 10
            await eventually(lambda: "is over" in trouble(system.driver, "shard-0"), SOON)
            assert "the life 1 of driver 'it' is over: its life 2 has replaced it" in (
                trouble(system.driver, "shard-0")
            )
            # The old one tries again and again, which the new one does not feel.
            await asyncio.sleep(2)
            (shard,) = new.stats().workers
            assert shard.connected
            assert shard.reconnects == 0
            assert sum("refused ipv4" in line for line in caplog.messages) <= 10
            assert not old.done()
        # Only a later life may have the shard again: the old request is not answered by the old.
        assert "shard-0" not in system.connected()
        old.cancel()
        await asyncio.gather(old, return_exceptions=True)
        async with second_driver(system, identity=DriverIdentity("it", 3)) as newest:
            await newest.start()
            assert newest.is_serving
    assert plain.token_ids


async def test_another_driver_is_refused_at_a_shard_in_use_by_the_name_of_who_has_it(
    checkpoints: Checkpoints,
) -> None:
    async with running_system(checkpoints, identity=DriverIdentity("owner")) as system:
        plain = await plain_answer(system)
        async with second_driver(system) as other:
            with pytest.raises(UnavailableError, match="stepping for the driver 'owner'"):
                await other.start()
        assert (await plain_answer(system)).token_ids == plain.token_ids
        assert [one.reconnects for one in system.driver.stats().workers] == [0]
        await system.settle()


async def test_a_drafter_serves_several_drivers_and_forgets_only_the_replaced_ones_sequences(
    checkpoints: Checkpoints,
) -> None:
    drafter = Drafter()
    desk = DraftingDesk(NgramProposer(), max_sequences=8)

    async def load() -> None:
        drafter.begin(desk)

    server = await serve_once_loaded(drafter, load, host=HOST, port=0)
    lives = {"other": [9], "one": [1, 2]}
    try:
        async with open_channel(server.address) as channel:
            streams = {}
            for name, numbers in lives.items():
                for life in numbers:
                    stub = drafting_pb2_grpc.DraftingServiceStub(channel)
                    call = stub.Draft(None, timeout=DEADLINE)
                    await call.write(await hello_to_drafter(stub, DriverIdentity(name, life)))
                    await call.write(_open(1))
                    await call.write(_open(2))
                    streams[name, life] = call
                    expected = 2 * min(len(streams), 2)
                    await eventually(lambda: desk.num_open == expected)  # noqa: B023 (awaited)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await streams["one", 1].read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert caught.value.details() == "the life 2 of driver 'one' has replaced 1"
            assert not streams["other", 9].done()
            assert not streams["one", 2].done()
            for call in streams.values():
                call.cancel()
    finally:
        await server.stop()


def _open(sequence_id: int) -> drafting_pb2.DraftRequest:
    spec = spec_to_wire(SequenceSpec(SamplingParams(), seed=1, prompt_length=3))
    opened = drafting_pb2.OpenSequence(sequence_id=sequence_id, token_ids=[1, 2, 3], spec=spec)
    return drafting_pb2.DraftRequest(open=opened)


@pytest.mark.parametrize("apart", [-1, 1])
async def test_a_drafter_one_minor_version_apart_is_used(
    checkpoints: Checkpoints, apart: int
) -> None:
    drafter = await start_versioned_drafter(minor_version(apart))
    async with running_system(checkpoints) as system:
        await system.driver.set_drafters({"near": drafter.address})
        await eventually(lambda: "near" in system.connected(), SOON)
        plain = await plain_answer(system)
        answer, _ = await interrupted(system, OPTIONS)
        assert answer.token_ids == plain.token_ids
    await drafter.stop()


async def test_a_drafter_of_a_far_version_is_not_used_and_nobody_else_notices(
    checkpoints: Checkpoints,
) -> None:
    drafter = await start_versioned_drafter(minor_version(2))
    async with running_system(checkpoints, drafters={"near": None}) as system:
        near = system.drafters["near"].address
        async with bystander(system) as seen:
            await system.driver.set_drafters({"near": near, "far": drafter.address})
            await eventually(lambda: bool(trouble(system.driver, "far")), SOON)
            await seen.grows(5)
        why = trouble(system.driver, "far")
        assert f"runs Paceline {own_version()}" in why
        assert minor_version(2) in why
        assert "versions may differ by one minor version; upgrade the older one" in why
        assert system.connected() == {"shard-0", "near"}
        await system.settle()
    await drafter.stop()


async def test_a_drafter_of_a_build_without_versions_is_refused_as_such(
    checkpoints: Checkpoints,
) -> None:
    class OlderBuild(LyingDrafter):
        async def DescribeDrafter(self, request: Any, context: Any) -> Any:
            described = await super().DescribeDrafter(request, context)
            described.ClearField("version")
            described.ClearField("life")
            return described

    older = OlderBuild()
    server = await serve_lying_drafter(older)
    async with running_system(checkpoints) as system:
        await system.driver.set_drafters({"older": server.address})
        await eventually(lambda: "tells no version" in trouble(system.driver, "older"), SOON)
        assert "as builds do that know no handshake" in trouble(system.driver, "older")
    assert older.streams == 0
    await server.stop()


@pytest.mark.timing
async def test_a_driver_of_a_far_version_does_not_start_and_says_both(
    checkpoints: Checkpoints,
) -> None:
    """The shard refuses it by name; the driver itself would accept that shard."""
    async with running_system(checkpoints, drafters={"near": None}) as system:
        far = DriverIdentity("far", version=minor_version(2))
        async with bystander(system), second_driver(system, identity=far) as driver:
            began = time.monotonic()
            with pytest.raises(VersionMismatchError) as caught:
                await driver.start()
            assert time.monotonic() - began < 10
        assert f"driver 'far' runs Paceline {minor_version(2)}" in str(caught.value)
        assert f"the target shard 'shard-0' runs {own_version()}" in str(caught.value)


async def test_streams_without_the_right_hello_end_with_the_reason_and_others_go_on(
    checkpoints: Checkpoints,
) -> None:
    async with running_system(checkpoints, drafters={"ngram": None}) as system:
        drafter, shard = system.drafters["ngram"], system.target
        assert drafter.life is not None
        one = DriverIdentity("one")
        wrong = one.hello("ngram", drafter.life ^ 1)
        request, invalid = drafting_pb2.DraftRequest, "INVALID_ARGUMENT"
        cases = [
            (request(close=drafting_pb2.CloseSequence(sequence_id=1)), invalid, "got close"),
            (request(), invalid, "got an empty message"),
            (request(hello=types_pb2.Hello()), invalid, "hello.driver: expected 1"),
            (request(hello=wrong), "UNAVAILABLE", "this drafter has the life"),
        ]
        async with bystander(system) as seen:
            async with open_channel(drafter.address) as channel:
                stub = drafting_pb2_grpc.DraftingServiceStub(channel)
                for asked, code, words in cases:
                    await _refused(stub.Draft(None, timeout=DEADLINE), asked, code, words)
                garbage = call_of_bytes(channel, "/paceline.v1.DraftingService/Draft")
                await _refused(garbage, b"\xff\xff\xff", invalid, "bytes that are no")
                stream = DraftStream(channel)
                await stream.call.write(_open(1))
                again = drafting_pb2.DraftRequest(hello=one.hello("ngram", drafter.life))
                await _refused(stream.call, again, invalid, "got hello")
            async with open_channel(shard.address) as channel:
                shards = target_pb2_grpc.TargetServiceStub(channel)
                first = target_pb2.StepRequest(step=1)
                words = "first message of a stream to a target shard, got step 1"
                await _refused(shards.Step(None, timeout=DEADLINE), first, invalid, words)
                greeting = target_pb2.StepRequest(hello=one.hello("shard-0", drafter.life))
                words = "this target shard has the life"
                await _refused(shards.Step(None, timeout=DEADLINE), greeting, "UNAVAILABLE", words)
                with pytest.raises(grpc.aio.AioRpcError, match="hello: expected as the first"):
                    await shards.Meet(target_pb2.MeetRequest(session="x"), timeout=DEADLINE)
            await seen.grows(5)
        await system.settle()
        assert {one.reconnects for one in system.driver.stats().workers} == {0}


async def _refused(call: Any, request: Any, code: str, words: str) -> None:
    with suppress(grpc.aio.AioRpcError):
        await call.write(request)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert words in (caught.value.details() or "")
    assert not code or caught.value.code().name == code

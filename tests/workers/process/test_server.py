"""Servers and channels: health, reflection, ports, keepalive, plain processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from paceline.errors import ConfigError, UnavailableError
from paceline.sampling import SamplingParams, SequenceSpec
from paceline.v1 import drafting_pb2, drafting_pb2_grpc
from tests.workers.grpc_peers import DEADLINE, DraftStream, open_channel
from workers.drafting.drafter import serve_drafter
from workers.drafting.kind import DrafterOptions
from workers.drafting.service import SERVICE_NAME, Drafter
from workers.process.server import start_server
from workers.process.threads import pin_cores


async def health_of(channel: grpc.aio.Channel, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=service)
    status: int = (await stub.Check(request, timeout=DEADLINE)).status
    return status


async def test_it_serves_once_it_is_loaded() -> None:
    drafter = Drafter()

    def add(server: grpc.aio.Server) -> tuple[str]:
        drafting_pb2_grpc.add_DraftingServiceServicer_to_server(drafter, server)
        return (SERVICE_NAME,)

    server = await start_server(add, host="127.0.0.1", serving=False)
    async with open_channel(server.address) as channel:
        not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
        assert await health_of(channel, "") == await health_of(channel, SERVICE_NAME) == not_serving
        stub = drafting_pb2_grpc.DraftingServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.DescribeDrafter(drafting_pb2.DescribeDrafterRequest(), timeout=DEADLINE)
        assert refusal.value.code() == grpc.StatusCode.UNAVAILABLE
        server.report(serving=True)
        serving = health_pb2.HealthCheckResponse.SERVING
        assert await health_of(channel, "") == await health_of(channel, SERVICE_NAME) == serving
    await server.stop()


@pytest.mark.parametrize("iterates", [False, True])
async def test_an_unexpected_error_is_told_by_an_id_that_the_log_has(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, *, iterates: bool
) -> None:
    class Broken(Drafter):
        async def DescribeDrafter(self, request: Any, context: Any) -> Any:
            raise RuntimeError("made to break")

        async def Draft(self, requests: Any, context: Any) -> Any:
            yield drafting_pb2.DraftResponse()
            raise RuntimeError("made to break")

    async def draft(requests: Any, context: Any) -> Any:
        raise RuntimeError("made to break")

    def add(server: grpc.aio.Server) -> tuple[str]:
        drafting_pb2_grpc.add_DraftingServiceServicer_to_server(broken, server)
        return (SERVICE_NAME,)

    broken = Broken()
    if not iterates:
        monkeypatch.setattr(broken, "Draft", draft)
    server = await start_server(add, host="127.0.0.1")
    async with open_channel(server.address) as channel:
        stub = drafting_pb2_grpc.DraftingServiceStub(channel)
        described = drafting_pb2.DescribeDrafterRequest()
        for ask in (
            lambda: stub.DescribeDrafter(described, timeout=DEADLINE),
            lambda: DraftStream(channel).proposals(1),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask()
            assert caught.value.code() is grpc.StatusCode.INTERNAL
            details = caught.value.details() or ""
            assert "made to break" not in details
            # Beside a stream its hello fails too, and either may be logged last.
            [record] = (
                record
                for record in caplog.records
                if record.getMessage().split()[1].rstrip(":") in details
            )
            assert record.exc_info
            assert "made to break" in str(record.exc_info[1])
    await server.stop()


async def test_reflection_lists_the_services() -> None:
    server = await serve_drafter(DrafterOptions("ngram"), host="127.0.0.1")
    async with open_channel(server.address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=DEADLINE
        )
        answer = await call.read()
    names = {service.name for service in answer.list_services_response.service}
    assert {SERVICE_NAME, "grpc.health.v1.Health"} <= names
    await server.stop()


async def test_a_port_in_use_is_named() -> None:
    first = await serve_drafter(DrafterOptions("ngram"), host="127.0.0.1")
    port = int(first.address.rpartition(":")[2])
    with pytest.raises(UnavailableError, match=rf"127\.0\.0\.1:{port}: the port is in use"):
        await serve_drafter(DrafterOptions("ngram"), host="127.0.0.1", port=port)
    await first.stop()
    await first.stop()
    again = await serve_drafter(DrafterOptions("ngram"), host="127.0.0.1", port=port)
    await again.stop()


async def test_an_idle_stream_outlives_the_pings() -> None:
    # A server with gRPC's defaults ends it after some five seconds (too_many_pings).
    server = await serve_drafter(DrafterOptions("ngram"), host="127.0.0.1")
    async with open_channel(server.address) as channel:
        stream = DraftStream(channel)
        spec = SequenceSpec(SamplingParams(), seed=0, prompt_length=4)
        await stream.open(1, spec, [1, 2, 1, 2])
        await asyncio.sleep(7)
        await stream.grant(1, 6)
        assert len(await stream.proposals(2)) == 1
    await server.stop()


@pytest.mark.parametrize("kind", ["ngram", "recycling"])
async def test_a_worker_as_a_plain_process(kind: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "workers.drafting.drafter", "--kind", kind),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    address = (await process.stdout.readline()).decode().strip()
    async with open_channel(address) as channel:
        stub = drafting_pb2_grpc.DraftingServiceStub(channel)
        answer = await stub.DescribeDrafter(drafting_pb2.DescribeDrafterRequest(), timeout=DEADLINE)
        assert (answer.pid, answer.kind) == (process.pid, kind)
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == 0


async def test_a_plain_process_fails_in_one_line(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "workers.target.shard", str(tmp_path / "nowhere")),
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()
    assert process.returncode == 2
    lines = errors.decode().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")


async def test_cores_that_are_not_there_are_refused() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(ConfigError, match="cores"):
        pin_cores((4095,))
    assert os.sched_getaffinity(0) == before

"""Several drivers behind one gateway, drivers that are lost, and the end of a gateway."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio
import uvicorn

from cluster.driver.driver import Driver, DriverOptions
from cluster.driver.service import serve_driver
from cluster.gateway import drivers
from cluster.gateway.app import Gateway
from cluster.gateway.server import listen, serve_until_signal, start_gateway
from paceline import AsyncClient
from paceline.errors import InternalError, UnavailableError
from tests.cluster.gateway.serving import Served, running_gateway
from tests.cluster.system import (
    HOST,
    Checkpoints,
    System,
    Wire,
    eventually,
    running_system,
    start_target,
)
from tests.held_ports import held_port
from tests.tiny import make_tiny_checkpoint

LONG: dict[str, Any] = {"prompt": "sea", "max_tokens": 120, "ignore_eos": True, "seed": 5}


@pytest_asyncio.fixture
async def system(checkpoints: Checkpoints) -> AsyncIterator[System]:
    async with running_system(checkpoints) as system:
        yield system


async def _reads(served: Served, **fields: Any) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream, which must end with [DONE]."""
    asked = LONG | fields | {"stream": True}
    async with served.http.stream("POST", "/v1/completions", json=asked) as answer:
        assert answer.status_code == 200
        lines = [line async for line in answer.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        for line in lines[:-1]:
            yield json.loads(line.removeprefix("data: "))


async def _text(served: Served, **fields: Any) -> str:
    return "".join([event["choices"][0]["text"] async for event in _reads(served, **fields)])


def _committed_since(drivers: list[Driver], before: list[int]) -> int:
    """Tokens that the driver that committed the fewest has committed."""
    now = [one.stats().committed_tokens for one in drivers]
    return min(after - least for after, least in zip(now, before, strict=True))


async def test_the_driver_with_the_fewest_requests_gets_the_next(
    checkpoints: Checkpoints, system: System
) -> None:
    async with (
        running_system(checkpoints) as other,
        running_gateway([system.server.address, other.server.address]) as served,
    ):
        both = [system.driver, other.driver]
        streams = [asyncio.create_task(_text(served)) for _ in range(4)]
        await eventually(lambda: sum(one.scheduler.num_running for one in both) == 4)
        assert [one.scheduler.num_running for one in both] == [2, 2]
        assert len(set(await asyncio.gather(*streams))) == 1
        # One is lost: its stream goes on at the other one, and later ones go there.
        expected = await _text(served)
        before = [one.stats().committed_tokens for one in both]
        streams = [asyncio.create_task(_text(served)) for _ in range(2)]
        await eventually(lambda: _committed_since(both, before) > 20)
        await other.server.stop()
        assert await asyncio.gather(*streams) == [expected] * 2
        assert await _text(served) == expected
        ready = (await served.http.get("/ready")).json()
        assert ready["models"] == ["target"]
        assert other.server.address in ready["troubles"][0]


async def test_an_error_after_the_first_tokens_is_an_event(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drivers, "AWAY_SECONDS", 0.3)
    async with running_gateway([system.server.address]) as served:

        async def read() -> list[dict[str, Any]]:
            return [event async for event in _reads(served)]

        reading = asyncio.create_task(read())
        await eventually(lambda: system.driver.stats().committed_tokens > 20)
        await system.server.stop()
        *events, last = await reading
        assert events
        assert last["error"]["code"] == "unavailable"
        # Before the first token an error is a status.
        answer = await served.complete(**LONG)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "unavailable"
        assert int(answer.headers["retry-after"]) >= 1
        assert (await served.http.get("/ready")).status_code == 503
        assert (await served.http.get("/health")).status_code == 200


async def test_a_gateway_waits_for_drivers_that_come_later(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drivers, "LOOK_SECONDS", 0.2)
    with held_port() as port:
        address = f"127.0.0.1:{port}"
        async with running_gateway([address], served_model_name="sea") as served:
            answer = await served.complete(**LONG)
            assert answer.status_code == 503
            assert address in answer.json()["error"]["message"]
            target = await start_target(checkpoints.target)
            options = DriverOptions(folder=checkpoints.target, target_addresses=(target.address,))
            _, server = await serve_driver(options, host=HOST, port=port)
            try:
                models = httpx2.Response(503)
                async with asyncio.timeout(60):
                    while models.status_code == 503:
                        await asyncio.sleep(0.1)
                        models = await served.http.get("/v1/models")
                assert [model["id"] for model in models.json()["data"]] == ["sea"]
                assert (await served.complete(model="target", prompt="a")).status_code == 404
                async with AsyncClient(address) as client:
                    told = await client.generate("a", max_tokens=4, seed=1)
                answer = await served.complete(model="sea", prompt="a", max_tokens=4, seed=1)
                assert answer.json()["model"] == "sea"
                assert answer.json()["choices"][0]["text"] == told.text
            finally:
                await server.stop()
                await target.stop()


async def test_a_lost_driver_of_one_model_is_503_and_not_404(
    checkpoints: Checkpoints, system: System, tmp_path: Path
) -> None:
    others = Checkpoints(make_tiny_checkpoint(tmp_path / "other"), checkpoints.drafter)
    async with (
        running_system(others) as other,
        running_gateway([system.server.address, other.server.address]) as served,
    ):
        for model in ("target", "other"):
            answer = await served.complete(model=model, prompt="a", max_tokens=1)
            assert answer.status_code == 200, answer.text
        await other.server.stop()
        for _ in range(2):
            answer = await served.complete(model="other", prompt="a", max_tokens=1)
            assert answer.status_code == 503
            assert other.server.address in answer.json()["error"]["message"]
        assert (await served.http.get("/v1/models/other")).status_code == 503
        assert (await served.complete(model="third", prompt="a")).status_code == 404
        assert (await served.complete(model="target", prompt="a")).status_code == 200


async def _becomes(served: Served, status: int) -> None:
    async with asyncio.timeout(60):
        while (await served.http.get("/ready")).status_code != status:
            await asyncio.sleep(0.05)


async def test_a_driver_without_its_target_and_one_that_drains_are_not_used(
    checkpoints: Checkpoints, system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drivers, "LOOK_SECONDS", 0.2)
    async with running_gateway([system.server.address]) as served:
        await _becomes(served, 200)
        port = int(system.target.address.rpartition(":")[2])
        await system.target.stop()
        await _becomes(served, 503)
        assert (await served.complete(prompt="a", max_tokens=1)).status_code == 503
        restarted = await start_target(checkpoints.target, port=port)
        try:
            await _becomes(served, 200)
            assert (await served.complete(prompt="a", max_tokens=1)).status_code == 200
            await system.driver.drain(0)
            await _becomes(served, 503)
        finally:
            await restarted.stop()


async def test_a_driver_that_hangs_is_not_used_until_it_answers(
    system: System, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(drivers, "LOOK_SECONDS", 0.2)
    wire = Wire(system.server.address)
    address = await wire.open()
    try:
        async with running_gateway([address]) as served:
            await _becomes(served, 200)
            monkeypatch.setattr(drivers, "ANSWER_SECONDS", 0.3)
            wire.hold()
            await _becomes(served, 503)
            wire.release()
            await _becomes(served, 200)
            told = [one.getMessage() for one in caplog.records if one.name == drivers.__name__]
            assert f"the driver at {address} is slow to answer" in told
            assert any(one.startswith(f"the driver at {address} is not used: ") for one in told)
            assert f"the driver at {address} serves target" in told
    finally:
        await wire.close()


async def test_while_a_deployment_starts_callers_learn_how_far_it_is(system: System) -> None:
    pool = drivers.DriverPool([])
    gateway = await start_gateway(Gateway(pool), listen(HOST, 0))
    try:
        states = {"shard-0": "has loaded 45 of 93 MiB", "drafter-0": "is ready"}
        pool.workers = states
        async with httpx2.AsyncClient(base_url=f"http://{gateway.address}", timeout=60) as http:
            ready = await http.get("/ready")
            assert ready.status_code == 503
            assert ready.json()["workers"] == states
            answer = await http.post("/v1/completions", json=LONG)
            assert answer.status_code == 503
            message = answer.json()["error"]["message"]
            assert "shard-0 has loaded 45 of 93 MiB; drafter-0 is ready" in message
            assert answer.headers["retry-after"]
            await pool.set_addresses([system.server.address])
            pool.workers = {}
            assert (await http.get("/ready")).status_code == 200
            assert (await http.post("/v1/completions", json=LONG)).status_code == 200
            await pool.set_addresses([])
            assert (await http.post("/v1/completions", json=LONG)).status_code == 503
    finally:
        await gateway.stop()
    await gateway.wait()


async def test_stopping_a_gateway_with_grace_lets_open_requests_end(system: System) -> None:
    pool = drivers.DriverPool([system.server.address])
    gateway = await start_gateway(Gateway(pool), listen(HOST, 0))
    async with httpx2.AsyncClient(base_url=f"http://{gateway.address}", timeout=60) as http:
        asking = asyncio.create_task(http.post("/v1/completions", json=LONG))
        await eventually(lambda: gateway.gateway.num_open == 1)
        await gateway.stop(60)
        assert (await asking).json()["usage"]["completion_tokens"] == LONG["max_tokens"]
    await system.settle()


def test_a_host_name_that_is_none_is_one_line() -> None:
    with pytest.raises(UnavailableError, match=re.escape("cannot listen at a..b:0: ")):
        listen("a..b", 0)


async def test_while_a_gateway_drains_open_requests_go_on_and_new_ones_get_503(
    system: System,
) -> None:
    async with running_gateway([system.server.address]) as served:
        expected = await _text(served)
        await eventually(lambda: served.gateway.num_open == 0)
        reading = asyncio.create_task(_text(served))
        await eventually(lambda: served.gateway.num_open == 1)
        draining = asyncio.create_task(served.gateway.drain(60))
        await asyncio.sleep(0)
        assert (await served.complete(**LONG)).status_code == 503
        assert (await served.http.get("/ready")).status_code == 503
        assert await reading == expected
        await draining
        assert served.gateway.num_open == 0


async def test_what_is_open_at_the_end_is_cut_off_with_an_error(system: System) -> None:
    async with running_gateway([system.server.address]) as served:

        async def read() -> list[dict[str, Any]]:
            return [event async for event in _reads(served)]

        reading = asyncio.create_task(read())
        await eventually(lambda: system.driver.stats().committed_tokens > 20)
        await served.gateway.drain(0.01)
        assert served.gateway.num_open == 1
        await served.gateway.cut_off()
        last = (await reading)[-1]
        assert "has ended" in last["error"]["message"]
    await system.settle()


async def test_an_end_of_the_http_server_by_itself_is_an_error_with_its_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = asyncio.Event()

    async def main_loop(self: object) -> None:
        await begun.wait()
        raise OSError("no file is left")

    monkeypatch.setattr(uvicorn.Server, "main_loop", main_loop)
    with pytest.raises(InternalError, match="the HTTP server ended") as caught:
        await serve_until_signal(
            Gateway(drivers.DriverPool([])),
            listen(HOST, 0),
            drain_seconds=1,
            on_ready=lambda _: begun.set(),
        )
    assert str(caught.value.__cause__) == "no file is left"

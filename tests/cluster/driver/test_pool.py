"""A pool: drafters that several drivers share, found by address."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.driver import pool_lookup
from cluster.driver.drafter_links import shares_host
from cluster.driver.pool_lookup import Nearness, SharedDrafters
from tests.cluster.interruptions import OPTIONS, PROMPT, plain_answer, port_of
from tests.cluster.system import (
    Checkpoints,
    System,
    eventually,
    make_checkpoints,
    running_system,
    start_drafter,
)
from tests.held_ports import held_port
from tests.tiny import make_tiny_checkpoint

FLOOD = 8


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return make_checkpoints(tmp_path_factory.mktemp("pool"))


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_lookup, "LOOK_SECONDS", 0.05)


def _drafters(system: System) -> list[Any]:
    return [one for one in system.driver.stats().workers if one.name.startswith("pool-")]


@pytest.mark.long
async def test_two_deployments_share_a_drafter_and_one_of_them_ends(
    checkpoints: Checkpoints,
) -> None:
    """The text of each is that of plain decoding, beside a flood, and when the pool goes too."""
    async with AsyncExitStack() as stack:
        port = stack.enter_context(held_port())
        pool = await start_drafter(checkpoints.drafter, port=port)
        stack.push_async_callback(pool.stop)
        shared: dict[str, Any] = {"shared_drafters": (pool.address,)}
        small = await stack.enter_async_context(
            running_system(checkpoints, party="small", target_rtt_ms=10.0, **shared)
        )
        name = f"pool-{pool.address}"
        await eventually(lambda: name in small.connected())
        plain = await plain_answer(small)
        lockstep = replace(OPTIONS, policy="lockstep")
        async with running_system(checkpoints, party="large", **shared) as large:
            await eventually(lambda: name in large.connected())
            flood = [
                asyncio.create_task(large.client.generate(PROMPT, replace(lockstep, seed=seed)))
                for seed in range(FLOOD)
            ]
            await eventually(lambda: large.driver.scheduler.num_running > 0)
            beside = await small.client.generate(PROMPT, lockstep)
            assert beside.token_ids == plain.token_ids
            assert beside.stats.accepted > 0
            answers = await asyncio.gather(*flood)
            expected = await large.client.generate(PROMPT, replace(OPTIONS, policy="off", seed=3))
            assert answers[3].token_ids == expected.token_ids
            assert all(answer.stats.accepted > 0 for answer in answers)
            leaving = asyncio.create_task(large.client.generate(PROMPT, lockstep))
            await eventually(lambda: large.driver.scheduler.num_running > 0)
            leaving.cancel()
        after = await small.client.generate(PROMPT, lockstep)
        assert after.token_ids == plain.token_ids
        assert after.stats.accepted > 0
        await pool.stop()
        await eventually(lambda: name not in small.connected())
        assert (await small.client.generate(PROMPT, lockstep)).token_ids == plain.token_ids
        back = await start_drafter(checkpoints.drafter, port=port_of(pool.address))
        stack.push_async_callback(back.stop)
        await eventually(lambda: name in small.connected())
        again = await small.client.generate(PROMPT, lockstep)
        assert again.token_ids == plain.token_ids
        assert again.stats.accepted > 0
        await small.settle()


async def test_a_drafter_of_a_pool_with_another_tokenizer_is_refused_by_name(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    other = make_tiny_checkpoint(tmp_path / "other", vocab_size=300)
    drafter = await start_drafter(other)
    try:
        async with running_system(checkpoints, shared_drafters=(drafter.address,)) as system:
            await eventually(lambda: "does not have the vocabulary" in _drafters(system)[0].trouble)
            assert drafter.address in _drafters(system)[0].trouble
            assert (await system.client.generate(PROMPT, OPTIONS)).stats.drafted == 0
    finally:
        await drafter.stop()


Lookup = Callable[..., list[tuple[Any, ...]]]


def _resolves_to(addresses: list[str]) -> Lookup:
    def look_up(host: str, port: int, *_: Any, **__: Any) -> list[tuple[Any, ...]]:
        if host != "pool.test":
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in addresses]

    return look_up


async def test_a_pool_grows_and_shrinks_with_what_its_name_resolves_to(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_lookup, "ABSENT_SECONDS", 0.2)
    found = ["127.0.0.1"]
    drafter = await start_drafter(None)
    port = port_of(drafter.address)
    try:
        async with running_system(
            checkpoints, drafters={"own": None}, shared_drafters=(f"localhost:{port}",)
        ) as system:
            await eventually(lambda: len(_drafters(system)) == 1)
            shared = SharedDrafters([f"pool.test:{port}", "no-such.test:1"])
            system.driver._shared._found.update({f"pool.test:{port}": []})
            system.driver._shared._seen.update({f"pool.test:{port}": {}})
            monkeypatch.setattr(socket, "getaddrinfo", _resolves_to(found))
            await shared.look()
            assert dict(shared.addresses) == {f"pool-127.0.0.1:{port}": f"127.0.0.1:{port}"}
            found.append("127.0.0.2")
            await eventually(lambda: len(_drafters(system)) == 2)
            await eventually(lambda: f"pool-127.0.0.1:{port}" in system.connected())
            found.remove("127.0.0.2")
            await eventually(lambda: len(_drafters(system)) == 1)
            assert "own" in system.connected()
            await system.driver.set_drafters({})
            assert len(_drafters(system)) == 1
            assert "own" not in system.connected()
    finally:
        await drafter.stop()


async def test_a_name_that_answers_in_parts_keeps_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = SharedDrafters(["pool.test:9002"])
    for part in (["10.0.0.1", "10.0.0.2"], ["10.0.0.2", "10.0.0.3"], ["10.0.0.3"]):
        monkeypatch.setattr(socket, "getaddrinfo", _resolves_to(part))
        await shared.look()
    assert [one[:8] for one in shared.addresses.values()] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    monkeypatch.setattr(pool_lookup, "ABSENT_SECONDS", 0.0)
    await shared.look()
    assert not shared.addresses


async def test_a_name_that_no_host_may_have_is_a_trouble_and_no_end() -> None:
    shared = SharedDrafters(["a..b:9002"])
    await shared.look()
    assert not shared.addresses


async def test_the_controller_and_the_pool_may_change_drafters_at_a_time(
    checkpoints: Checkpoints,
) -> None:
    async with running_system(checkpoints, drafters={"one": None, "two": None}) as system:
        addresses = {name: server.address for name, server in system.drafters.items()}
        one = {"one": addresses["one"]}
        await asyncio.gather(
            system.driver.set_drafters({}),
            system.driver._use_drafters(),
            system.driver.set_drafters(one),
        )
        await eventually(lambda: system.connected() == {"shard-0", "one"})


async def test_a_name_that_cannot_be_looked_up_keeps_what_it_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = SharedDrafters(["pool.test:9002"])
    monkeypatch.setattr(socket, "getaddrinfo", _resolves_to(["10.0.0.1", "10.0.0.2"]))
    await shared.look()
    assert list(shared.addresses.values()) == ["10.0.0.1:9002", "10.0.0.2:9002"]

    def fails(*_: Any, **__: Any) -> None:
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    await shared.look()
    assert len(shared.addresses) == 2


def test_the_finest_label_that_both_have_tells_the_distance() -> None:
    near = Nearness(("rack", "zone"), {"rack": "7", "zone": "a", "other": "x"})
    assert near.distance_to({"rack": "7", "zone": "a"}) == 0
    assert near.distance_to({"rack": "8", "zone": "a"}) == 1
    assert near.distance_to({"rack": "8", "zone": "b", "other": "x"}) == 2
    assert near.distance_to({}) == 2
    assert Nearness(("zone",)).distance_to({"zone": "a"}) == 1  # the driver itself has no zone
    assert Nearness().distance_to({"zone": "a"}) == 0


def test_a_drafter_with_the_address_of_a_shard_shares_its_host() -> None:
    shards = ("10.0.0.1:7001#3f", "10.0.0.2:7001")
    assert shares_host("10.0.0.2:7010", shards)
    assert not shares_host("10.0.0.3:7001", shards)
    assert shares_host("127.0.0.1:1", ("localhost:2",))
    assert shares_host("[::1]:1", ("127.0.0.2:2",))


async def test_near_drafters_come_first_and_far_ones_when_these_have_more_to_do(
    checkpoints: Checkpoints,
) -> None:
    """The far drafter's name comes first, so without labels it would be chosen."""
    far = await start_drafter(checkpoints.drafter, labels={"zone": "b"})
    near = await start_drafter(checkpoints.drafter, labels={"zone": "a"})
    try:
        async with running_system(
            checkpoints,
            drafter_addresses={"drafter-0": far.address, "drafter-1": near.address},
            nearness=Nearness(("zone",), {"zone": "a"}),
        ) as system:
            await eventually(lambda: {"drafter-0", "drafter-1"} <= system.connected())

            def passes() -> list[int]:
                found = {one.name: one.passes for one in system.driver.stats().workers}
                return [found["drafter-0"], found["drafter-1"]]

            lockstep = replace(OPTIONS, policy="lockstep", max_tokens=30)
            await system.client.generate(PROMPT, lockstep)
            assert passes()[0] == 0
            assert passes()[1] > 0
            many = [system.client.generate(PROMPT, replace(lockstep, seed=one)) for one in range(6)]
            await asyncio.gather(*many)
            assert passes()[0] > 0
            await system.settle()
    finally:
        await far.stop()
        await near.stop()

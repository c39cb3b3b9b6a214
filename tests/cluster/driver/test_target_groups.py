"""A target of two groups over gRPC: requests share them, and both verify one request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.driver.driver import DriverOptions
from cluster.driver.service import serve_driver
from paceline import AsyncClient, GenerateOptions
from paceline.errors import CheckpointError, InvalidRequestError, UnavailableError
from tests.cluster.interruptions import OPTIONS, PROMPT, interrupted, plain_answer, port_of
from tests.cluster.system import (
    HOST,
    Checkpoints,
    System,
    eventually,
    make_checkpoints,
    running_system,
    start_target,
)
from tests.held_ports import held_port
from tests.tiny import make_tiny_checkpoint
from workers.emulated.latency_profiles import load_profile
from workers.emulated.replay_target import ReplayEngine
from workers.emulated.replay_text import ReplayText
from workers.engine.load.checkpoint import inspect_checkpoint
from workers.models.stand_in import make_stand_in
from workers.process.server import RunningServer, start_server
from workers.target.servicer import TargetShard
from workers.target.shard import TargetShardOptions, serve_target_shard

SECOND = "replica-1.shard-0"
BOTH = {"shard-0", SECOND}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return make_checkpoints(tmp_path_factory.mktemp("groups"))


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_stand_in(tmp_path_factory.mktemp("stand-in"))


@asynccontextmanager
async def two_groups(
    checkpoints: Checkpoints, *, target_rtt_ms: float = 0.0
) -> AsyncIterator[tuple[System, RunningServer]]:
    """The system, and the only shard of the second group. `target_rtt_ms`: to the first group."""
    second = await start_target(checkpoints.target)
    try:
        async with running_system(
            checkpoints,
            drafters={"d": checkpoints.drafter},
            more_targets=(second.address,),
            target_groups=2,
            target_rtt_ms=target_rtt_ms,
        ) as system:
            yield system, second
    finally:
        await second.stop()


def passes(system: System) -> list[int]:
    """The number of steps of each group."""
    return [one.passes for one in system.driver.stats().workers if one.kind == "target"]


async def test_requests_share_the_groups(checkpoints: Checkpoints) -> None:
    """Each request takes long enough for the next one to come meanwhile."""
    async with two_groups(checkpoints, target_rtt_ms=10.0) as (system, _):
        assert system.connected() == {*BOTH, "d"}
        seeds = range(6)
        options = [replace(OPTIONS, seed=seed, max_tokens=40) for seed in seeds]
        plain = [
            await system.client.generate(PROMPT, replace(one, policy="off")) for one in options
        ]
        before = passes(system)
        answers = await asyncio.gather(*[system.client.generate(PROMPT, one) for one in options])
        assert [one.token_ids for one in answers] == [one.token_ids for one in plain]
        assert all(after > earlier for after, earlier in zip(passes(system), before, strict=True))
        await system.settle()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_one_request_is_verified_by_both(
    checkpoints: Checkpoints, temperature: float
) -> None:
    """One group is far away, so that the other often answers first for what both verify."""
    async with two_groups(checkpoints, target_rtt_ms=10.0) as (system, _):
        options = replace(OPTIONS, temperature=temperature, max_tokens=240)
        plain = await system.client.generate(PROMPT, replace(options, policy="off"))
        before = passes(system)
        answer = await system.client.generate(PROMPT, replace(options, policy="replicas"))
        assert answer.token_ids == plain.token_ids
        steps = [after - earlier for after, earlier in zip(passes(system), before, strict=True)]
        assert min(steps) > 3, "a prefill and some windows each"
        await system.settle()


async def test_groups_are_added_and_removed_while_requests_run(checkpoints: Checkpoints) -> None:
    """Twice, so that a number is used again. The second change down comes with one up behind it."""
    second = await start_target(checkpoints.target)
    try:
        async with running_system(checkpoints, drafters={"d": checkpoints.drafter}) as system:
            driver, one = system.driver, [system.target.address]
            options = [replace(OPTIONS, seed=seed, max_tokens=160) for seed in range(4)]
            plain = [
                (await system.client.generate(PROMPT, replace(asked, policy="off"))).token_ids
                for asked in options
            ]
            steps = [[*one, second.address], one, [*one, second.address], one]
            for number, addresses in enumerate(steps):
                answers = asyncio.gather(*[system.client.generate(PROMPT, o) for o in options])
                await eventually(lambda: driver.scheduler.num_running == len(options))
                driver.set_target(addresses)
                if number == 1:
                    driver.set_target([*one, second.address])
                    driver.set_target(one)
                assert await driver.until_scaled((0, 1), 30.0) is None
                groups = driver.topology().target_groups
                names = [shard.name for group in groups for shard in group if shard.connected]
                assert names == ["shard-0", SECOND][: len(addresses)]
                assert [list(one.token_ids) for one in await answers] == [*map(list, plain)]
            await system.settle()
    finally:
        await second.stop()


async def test_a_group_of_another_checkpoint_is_not_added(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    other = await start_target(make_tiny_checkpoint(tmp_path / "other", num_layers=1))
    try:
        async with running_system(checkpoints, drafters={}) as system:
            system.driver.set_target([system.target.address, other.address])
            trouble = await system.driver.until_scaled([1], 1000.0)
            assert "target group 1 has not joined: target group 1 differs" in (trouble or "")
            await system.client.generate(PROMPT, OPTIONS)
            system.driver.set_target([system.target.address])
            assert await system.driver.until_scaled([1], 10.0) is None
            assert len(system.driver.topology().target_groups) == 1
    finally:
        await other.stop()


async def test_a_group_joins_while_another_is_away(checkpoints: Checkpoints) -> None:
    """What is wrong with the other one is not the trouble of the new one."""
    second = await start_target(checkpoints.target)
    try:
        async with running_system(checkpoints, drafters={}) as system:
            await system.target.stop()
            await eventually(lambda: "shard-0" not in system.connected())
            system.driver.set_target([system.target.address, second.address])
            assert await system.driver.until_scaled([1], 30.0) is None
            trouble = await system.driver.until_scaled([0], 0.0)
            assert "target group 0 has not joined" in (trouble or "")
            await system.client.generate(PROMPT, OPTIONS)
    finally:
        await second.stop()


@pytest.mark.parametrize("first", [True, False])
async def test_a_group_that_ends_half_way_and_comes_back(
    checkpoints: Checkpoints, first: bool
) -> None:
    async with two_groups(checkpoints) as (system, second):
        plain = await plain_answer(system)
        lost, name = (system.target, "shard-0") if first else (second, SECOND)
        restarted = []

        async def back() -> None:
            restarted.append(await start_target(checkpoints.target, port=port_of(lost.address)))
            await eventually(lambda: name in system.connected())

        try:
            options = replace(OPTIONS, policy="replicas")
            answer, _ = await interrupted(system, options, lost.stop, back)
            assert answer.token_ids == plain.token_ids
            again = await system.client.generate(PROMPT, options)
            assert again.token_ids == plain.token_ids
            await system.settle()
        finally:
            for server in restarted:
                await server.stop()


@pytest.mark.parametrize(("name", "seed"), [("other", 0), ("target", 1)])
async def test_groups_of_different_checkpoints(
    checkpoints: Checkpoints, tmp_path: Path, name: str, seed: int
) -> None:
    """They differ by name, or only by weights: two trainings of one model under one name."""
    other = make_tiny_checkpoint(tmp_path / name, seed=seed)
    shards = [await start_target(folder) for folder in (checkpoints.target, other)]
    addresses = tuple(shard.address for shard in shards)
    options = DriverOptions(folder=checkpoints.target, target_addresses=addresses, target_groups=2)
    try:
        with pytest.raises(CheckpointError, match="start all groups with the same checkpoint"):
            await serve_driver(options, host=HOST)
    finally:
        for shard in shards:
            await shard.stop()


async def test_a_group_that_is_not_there(checkpoints: Checkpoints) -> None:
    shard = await start_target(checkpoints.target)
    options = DriverOptions(
        folder=checkpoints.target,
        target_addresses=(shard.address, f"{HOST}:1"),
        target_groups=2,
        connect_seconds=5.0,
    )
    try:
        with pytest.raises(UnavailableError, match=rf"{HOST}:1 could not be reached"):
            await serve_driver(options, host=HOST)
    finally:
        await shard.stop()


async def test_one_group_alone_has_no_replicas(checkpoints: Checkpoints) -> None:
    async with running_system(checkpoints) as system:
        with pytest.raises(InvalidRequestError, match=r"at least 2 target groups.* has 1"):
            await system.client.generate(PROMPT, replace(OPTIONS, policy="replicas"))


async def test_groups_that_hold_their_kv_in_another_dtype(checkpoints: Checkpoints) -> None:
    """Each dtype gives another text, so a request must not move from one group to the other."""
    shards = [
        await serve_target_shard(
            TargetShardOptions(
                folder=checkpoints.target, weights=weights, kv_memory_bytes=4 * 1024 * 1024
            ),
            host=HOST,
        )
        for weights in ("float32", "float16")
    ]
    await _are_refused(checkpoints.target, shards, "dtype (float16|float32) instead of")


async def test_groups_with_blocks_of_another_size(stand_in: Path) -> None:
    shards = [await _serve_replay(stand_in, block_size=size) for size in (16, 32)]
    await _are_refused(stand_in, shards, "block_size (16|32) instead of")


async def test_a_target_that_comes_back_with_blocks_of_another_size(stand_in: Path) -> None:
    """Two requests share a block of the old size, but no block of the new size."""
    shared = list(range(100, 116))
    prompts = [shared + list(range(first, first + 40)) for first in (200, 300)]
    with held_port() as port:
        shard = await _serve_replay(stand_in, block_size=16, port=port)
        options = DriverOptions(folder=stand_in, target_addresses=(shard.address,))
        driver, server = await serve_driver(options, host=HOST)
        try:
            async with AsyncClient(server.address) as client:
                asked = GenerateOptions(max_tokens=200, seed=3, ignore_eos=True, policy="off")
                plain = [(await client.generate(one, asked)).token_ids for one in prompts]
                answers = [asyncio.create_task(client.generate(one, asked)) for one in prompts]
                steps = driver.stats().steps
                await eventually(lambda: driver.stats().steps > steps + 20)
                await shard.stop()
                shard = await _serve_replay(stand_in, block_size=32, port=port)
                assert [(await answer).token_ids for answer in answers] == plain
        finally:
            await server.stop()
            await shard.stop()


async def _are_refused(folder: Path, shards: list[RunningServer], why: str) -> None:
    addresses = tuple(shard.address for shard in shards)
    options = DriverOptions(folder=folder, target_addresses=addresses, target_groups=2)
    try:
        with pytest.raises(CheckpointError, match=why):
            await serve_driver(options, host=HOST)
    finally:
        for shard in shards:
            await shard.stop()


async def _serve_replay(folder: Path, *, block_size: int, port: int = 0) -> RunningServer:
    """An emulated target: a real shard that stores token ids in place of keys and values."""
    info = inspect_checkpoint(folder)
    profile = load_profile("70b-4xh100").scaled(0.2)
    engine = ReplayEngine(info, profile, ReplayText(info.vocab_size), block_size=block_size)
    shard = TargetShard(clock=engine.clock)
    shard.begin(engine, engine.verdicts)
    return await start_server(shard.add_to, host=HOST, port=port)

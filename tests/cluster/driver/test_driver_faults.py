"""Targets, callers and ports that fail, and wrong ones: equal text, or an error that says why."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.decoding.suspects import MOST_LOST_STEPS
from cluster.driver.driver import Driver, DriverOptions
from cluster.driver.generation import Generation
from cluster.driver.service import serve_driver
from cluster.driver.target_links import StepTimeout
from paceline import (
    AsyncClient,
    Finished,
    Started,
    UnavailableError,
)
from paceline.channel import WORKERS
from paceline.errors import (
    CheckpointError,
    OverloadedError,
    RequestFaultError,
    VocabularyMismatchError,
    WorkerLostError,
)
from tests.cluster.hostile import (
    HungTarget,
    LyingTarget,
    serve_false_target,
)
from tests.cluster.interruptions import OPTIONS, PROMPT, interrupted, plain_answer, port_of
from tests.cluster.system import (
    HOST,
    Checkpoints,
    Wire,
    eventually,
    make_checkpoints,
    running_system,
    start_target,
)
from tests.tiny import make_tiny_checkpoint
from workers.engine.load.checkpoint import inspect_checkpoint
from workers.process.server import RunningServer
from workers.verification.rule import RULES


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return make_checkpoints(tmp_path_factory.mktemp("faults"))


async def test_a_target_that_ends_half_way_and_comes_back(checkpoints: Checkpoints) -> None:
    async with running_system(checkpoints, drafters={"d": checkpoints.drafter}) as system:
        plain = await plain_answer(system)
        port = port_of(system.target.address)
        restarted = []

        async def restart() -> None:
            await system.target.stop()
            await eventually(lambda: "shard-0" not in system.connected())
            restarted.append(await start_target(checkpoints.target, port=port))

        try:
            first, (second, _) = await asyncio.gather(
                system.client.generate(PROMPT, OPTIONS), interrupted(system, OPTIONS, restart)
            )
            assert first.token_ids == second.token_ids == plain.token_ids
            assert system.driver.stats().workers[0].reconnects >= 1
            await system.settle()
        finally:
            for server in restarted:
                await server.stop()


async def test_a_target_that_stays_away(checkpoints: Checkpoints) -> None:
    async with running_system(checkpoints, target_patience=0.3) as system:
        port = port_of(system.target.address)
        with pytest.raises(WorkerLostError, match=r"was not back within 0\.3 s"):
            await interrupted(system, OPTIONS, system.target.stop)
        with pytest.raises(WorkerLostError, match="start it again"):
            await system.client.generate(PROMPT, OPTIONS)
        (shard,) = system.driver.stats().workers
        assert not shard.connected
        assert shard.away_seconds > 0.3
        assert shard.trouble
        await system.settle()
        restarted = await start_target(checkpoints.target, port=port)
        try:
            await eventually(lambda: "shard-0" in system.connected())
            (shard,) = (await system.client.stats()).workers
            assert (shard.away_seconds, shard.trouble) == (0.0, "")
            assert len((await system.client.generate(PROMPT, OPTIONS)).token_ids) == 120
        finally:
            await restarted.stop()


async def test_a_caller_that_is_silent_for_seconds_keeps_its_request(
    checkpoints: Checkpoints,
) -> None:
    """Longer than workers may be: a caller's host may be suspended, or far away."""
    async with running_system(checkpoints) as system:
        wire = Wire(system.server.address)
        try:
            async with AsyncClient(await wire.open()) as caller:
                stream = caller.stream(PROMPT, OPTIONS)
                assert isinstance(await anext(stream), Started)
                wire.hold()
                await asyncio.sleep((WORKERS.interval_ms + WORKERS.timeout_ms) / 1000 + 0.5)
                wire.release()
                events = [event async for event in stream]
            assert isinstance(events[-1], Finished)
        finally:
            await wire.close()


async def _to_its_end(generation: Generation) -> None:
    async for _ in generation:
        pass


@pytest.mark.parametrize("kind", [HungTarget, LyingTarget])
async def test_a_false_target_is_left(checkpoints: Checkpoints, kind: type[HungTarget]) -> None:
    """It is taken for lost at each step, and there again at once: the request is not tried for
    ever.
    """
    false = kind(inspect_checkpoint(checkpoints.target).vocabulary_digest)
    target = await serve_false_target(false)
    options = DriverOptions(
        folder=checkpoints.target,
        target_addresses=(target.address,),
        step_timeout=StepTimeout(seconds=0.1, seconds_per_token=0.0),
    )
    driver = Driver(options)
    try:
        await driver.start()
        generation = await driver.submit(PROMPT, OPTIONS)
        lost = rf"lost during {MOST_LOST_STEPS} steps of this request in a row"
        with pytest.raises(RequestFaultError, match=lost):
            await asyncio.wait_for(_to_its_end(generation), 120)
        assert driver.stats().workers[0].reconnects >= MOST_LOST_STEPS - 1
        await eventually(lambda: driver.scheduler.num_running == 0)
        driver.scheduler.check_integrity()
    finally:
        await driver.stop()
        await target.stop()


async def test_a_target_that_comes_back_as_another(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Requests are told why it is refused, not what was known before."""
    other = make_tiny_checkpoint(tmp_path / "other", vocab_size=300)
    refusal = r"was not back within 0\.3 s \(shard-0 at .* serves 'other', whose vocabulary is not"
    async with running_system(checkpoints, target_patience=0.3) as system:
        port = port_of(system.target.address)
        restarted: list[RunningServer] = []

        async def restart() -> None:
            await system.target.stop()
            restarted.append(await start_target(other, port=port))

        with pytest.raises(WorkerLostError, match="was not back within"):
            await interrupted(system, OPTIONS, restart)
        system.driver.note_target("shard-0 is started again")
        try:
            await eventually(lambda: "whose vocabulary" in str(system.driver._dispatch.unavailable))
            with pytest.raises(WorkerLostError, match=refusal):
                await system.client.generate(PROMPT, OPTIONS)
        finally:
            await restarted[0].stop()
        await system.settle()


async def test_another_vocabulary_at_the_start(checkpoints: Checkpoints, tmp_path: Path) -> None:
    other = make_tiny_checkpoint(tmp_path / "other", vocab_size=300)
    with pytest.raises(VocabularyMismatchError, match=r"d \('other', 300 tokens\).*'target'"):
        async with running_system(checkpoints, drafters={"d": other}):
            pass


async def test_another_target_than_the_checkpoint(checkpoints: Checkpoints, tmp_path: Path) -> None:
    other = make_tiny_checkpoint(tmp_path / "other", vocab_size=300)
    target = await start_target(other)
    options = DriverOptions(folder=checkpoints.target, target_addresses=(target.address,))
    try:
        with pytest.raises(VocabularyMismatchError, match="serves 'other'"):
            await serve_driver(options, host=HOST)
    finally:
        await target.stop()


async def test_a_shard_that_lacks_a_rule_is_refused_by_name(checkpoints: Checkpoints) -> None:
    digest = inspect_checkpoint(checkpoints.target).vocabulary_digest
    lacking = HungTarget(digest)
    lacking.rules = [name for name in RULES if name != "kseq"]
    target = await serve_false_target(lacking)
    options = DriverOptions(folder=checkpoints.target, target_addresses=(target.address,))
    try:
        with pytest.raises(CheckpointError, match=r"shard-0 at .* lacks .* 'kseq'.*: install"):
            await serve_driver(options, host=HOST)
    finally:
        await target.stop()


async def test_no_target(checkpoints: Checkpoints) -> None:
    options = DriverOptions(
        folder=checkpoints.target, target_addresses=("127.0.0.1:1",), connect_seconds=0.3
    )
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1 could not be reached"):
        await serve_driver(options, host=HOST)


async def test_a_driver_that_is_drained_ends_what_it_began(checkpoints: Checkpoints) -> None:
    async with running_system(checkpoints, max_num_seqs=1, target_rtt_ms=10) as system:
        plain = await plain_answer(system)
        asked = [asyncio.create_task(system.client.generate(PROMPT, OPTIONS)) for _ in range(3)]
        scheduler = system.driver.scheduler
        await eventually(lambda: scheduler.num_running + scheduler.num_waiting == 3)
        draining = asyncio.create_task(system.driver.drain(60))
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError, match="takes no more requests"):
            await system.client.generate(PROMPT, OPTIONS)
        assert await draining == 0
        assert [one.token_ids for one in await asyncio.gather(*asked)] == [plain.token_ids] * 3


async def test_a_drain_has_an_end(checkpoints: Checkpoints) -> None:
    async with running_system(checkpoints, target_rtt_ms=50) as system:
        asked = asyncio.create_task(system.client.generate(PROMPT, OPTIONS))
        await eventually(lambda: system.driver.scheduler.num_running == 1)
        assert await system.driver.drain(0.1) == 1
        await system.driver.stop()
        with pytest.raises(UnavailableError, match="shutting down"):
            await asked


async def test_a_full_queue(checkpoints: Checkpoints) -> None:
    """Four seconds would pass before there is room again."""
    async with running_system(
        checkpoints, max_num_seqs=1, max_waiting=1, target_rtt_ms=10
    ) as system:
        long = replace(OPTIONS, max_tokens=400)
        running = [await system.driver.submit(PROMPT, long) for _ in range(2)]
        with pytest.raises(OverloadedError, match="1 requests are waiting"):
            await system.client.generate(PROMPT, OPTIONS)
        for generation in running:
            generation.cancel()
        await system.settle()
        assert len((await system.client.generate(PROMPT, OPTIONS)).token_ids) == 120


async def test_a_port_in_use(checkpoints: Checkpoints) -> None:
    async with running_system(checkpoints) as system:
        options = DriverOptions(
            folder=checkpoints.target, target_addresses=(system.target.address,)
        )
        with pytest.raises(UnavailableError, match="the port is in use"):
            await serve_driver(options, host=HOST, port=port_of(system.server.address))


async def test_stopping_ends_open_requests(checkpoints: Checkpoints) -> None:
    async with running_system(checkpoints) as system:
        with pytest.raises(UnavailableError):
            await interrupted(system, OPTIONS, system.driver.stop)

"""Workers that die, hang, lie or are the wrong ones: equal text, or an error that says why."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.driver import Driver, DriverOptions
from cluster.inference import serve_driver
from cluster.target_link import StepTimeout
from paceline import (
    AsyncClient,
    Chunk,
    Completion,
    Finished,
    GenerateOptions,
    Started,
    UnavailableError,
)
from paceline.channel import WORKERS
from paceline.errors import OverloadedError, VocabularyMismatchError, WorkerLostError
from paceline.generation import CompletionBuilder
from paceline.v1 import types_pb2
from tests.cluster.hostile import (
    BREACHES,
    PROBABILITY_BREACHES,
    HungDrafter,
    HungTarget,
    LyingDrafter,
    LyingTarget,
    MalformedDrafter,
    serve_false_target,
    serve_lying_drafter,
)
from tests.cluster.system import (
    HOST,
    Checkpoints,
    System,
    Wire,
    eventually,
    make_checkpoints,
    running_system,
    start_drafter,
    start_target,
)
from tests.tiny import make_tiny_checkpoint
from workers.engine.checkpoint import inspect_checkpoint

OPTIONS = GenerateOptions(
    temperature=1.0, seed=11, max_tokens=120, ignore_eos=True, policy="chain", window=4
)
PROMPT = "The quick brown fox jumps"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return make_checkpoints(tmp_path_factory.mktemp("faults"))


async def _plain(system: System) -> Completion:
    return await system.client.generate(PROMPT, replace(OPTIONS, policy="off"))


async def _interrupted(
    system: System, options: GenerateOptions, *acts: Callable[[], Awaitable[object]]
) -> tuple[Completion, float]:
    """An answer during which each act happens, 30 tokens apart; and the longest pause in it."""
    builder = CompletionBuilder()
    left = list(acts)
    pause, last = 0.0, None
    async for event in system.client.stream(PROMPT, options):
        now = time.monotonic()
        pause = max(pause, now - last) if last is not None else 0.0
        builder.add(event)
        if isinstance(event, Chunk) and left and event.offset >= 30 * (len(acts) - len(left) + 1):
            await left.pop(0)()
            now = time.monotonic()
        last = now
    assert not left
    return builder.build(), pause


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


@pytest.mark.parametrize("policy", ["chain", "lockstep", "pearl"])
async def test_a_drafter_that_ends_half_way_and_comes_back(
    checkpoints: Checkpoints, policy: str
) -> None:
    async with running_system(checkpoints, drafters={"d": checkpoints.drafter}) as system:
        plain = await _plain(system)
        port = _port(system.drafters["d"].address)
        options = replace(OPTIONS, policy=policy)
        answer, pause = await _interrupted(system, options, system.drafters["d"].stop)
        assert answer.token_ids == plain.token_ids
        assert pause < 0.2
        assert system.connected() == {"shard-0"}
        restarted = await start_drafter(checkpoints.drafter, port=port)
        try:
            await eventually(lambda: "d" in system.connected())
            assert system.driver.stats().workers[1].reconnects == 1
            lockstep = replace(OPTIONS, policy="lockstep")
            again = await system.client.generate(PROMPT, lockstep)
            assert again.token_ids == plain.token_ids
            assert again.stats.accepted > 0
            await system.settle()
        finally:
            await restarted.stop()


async def test_a_drafter_that_comes_back_in_the_middle_of_a_request(
    checkpoints: Checkpoints,
) -> None:
    async with running_system(checkpoints, drafters={"d": checkpoints.drafter}) as system:
        plain = await _plain(system)
        fresh = await start_drafter(checkpoints.drafter)
        try:
            options = replace(OPTIONS, policy="lockstep")

            async def move() -> None:
                await system.driver.set_drafters({"d": fresh.address})

            async def wait() -> None:
                await eventually(lambda: "d" in system.connected())

            answer, _ = await _interrupted(system, options, system.drafters["d"].stop, move, wait)
            assert answer.token_ids == plain.token_ids
            tail = answer.origins[100:]
            assert "draft" in tail
            worker = system.driver.stats().workers[1]
            assert (worker.address, worker.reconnects) == (fresh.address, 1)
            await system.driver.set_drafters({})
            assert [w.name for w in system.driver.stats().workers] == ["shard-0"]
            await system.settle()
        finally:
            await fresh.stop()


async def test_a_target_that_ends_half_way_and_comes_back(checkpoints: Checkpoints) -> None:
    async with running_system(checkpoints, drafters={"d": checkpoints.drafter}) as system:
        plain = await _plain(system)
        port = _port(system.target.address)
        restarted = []

        async def restart() -> None:
            await system.target.stop()
            await eventually(lambda: "shard-0" not in system.connected())
            restarted.append(await start_target(checkpoints.target, port=port))

        try:
            first, (second, _) = await asyncio.gather(
                system.client.generate(PROMPT, OPTIONS), _interrupted(system, OPTIONS, restart)
            )
            assert first.token_ids == second.token_ids == plain.token_ids
            assert system.driver.stats().workers[0].reconnects == 1
            await system.settle()
        finally:
            for server in restarted:
                await server.stop()


async def test_a_target_that_stays_away(checkpoints: Checkpoints) -> None:
    async with running_system(checkpoints, target_patience=0.3) as system:
        port = _port(system.target.address)
        with pytest.raises(WorkerLostError, match=r"was not back within 0\.3 s"):
            await _interrupted(system, OPTIONS, system.target.stop)
        with pytest.raises(WorkerLostError, match="start it again"):
            await system.client.generate(PROMPT, OPTIONS)
        await system.settle()
        restarted = await start_target(checkpoints.target, port=port)
        try:
            await eventually(lambda: "shard-0" in system.connected())
            assert len((await system.client.generate(PROMPT, OPTIONS)).token_ids) == 120
        finally:
            await restarted.stop()


async def test_a_lying_drafter_alters_nothing(checkpoints: Checkpoints) -> None:
    async with running_system(checkpoints, wait_ms=20.0) as system:
        plain = await _plain(system)
        liar = LyingDrafter()
        server = await serve_lying_drafter(liar)
        try:
            await system.driver.set_drafters({"liar": server.address})
            await eventually(lambda: "liar" in system.connected())
            for policy in ("chain", "lockstep"):
                answer = await system.client.generate(PROMPT, replace(OPTIONS, policy=policy))
                assert answer.token_ids == plain.token_ids
            assert liar.told > 100
            assert system.driver.scheduler.totals.dropped_proposals > 0
            assert "liar" in system.connected()
            assert system.driver.stats().workers[1].malformed == 0
            await system.settle()
        finally:
            await server.stop()


@pytest.mark.parametrize("breach", BREACHES)
async def test_malformed_proposals_make_a_drafter_suspect(
    checkpoints: Checkpoints, breach: str, caplog: pytest.LogCaptureFixture
) -> None:
    """After three it is used no more, until another process answers; the text stays right."""
    async with running_system(checkpoints, wait_ms=20.0, drafter_timeout=0.2) as system:
        plain = await _plain(system)
        hostile = MalformedDrafter(BREACHES[breach])
        server = await serve_lying_drafter(hostile)
        try:
            await system.driver.set_drafters({"bad": server.address})
            await eventually(lambda: "bad" in system.connected())
            for policy in ("chain", "lockstep"):
                answer = await system.client.generate(PROMPT, replace(OPTIONS, policy=policy))
                assert answer.token_ids == plain.token_ids
                assert answer.stats.drafted == 0
            await eventually(lambda: system.driver.stats().workers[1].suspect)
            worker = (await system.client.stats()).workers[1]
            assert (worker.connected, worker.suspect, worker.malformed >= 3) == (False, True, True)
            await asyncio.sleep(0.5)
            assert hostile.streams == 1
            lines = [r.getMessage() for r in caplog.records if "is suspect" in r.getMessage()]
            assert len(lines) == 1
            hostile.pid = 2
            await eventually(lambda: "bad" in system.connected())
            assert not system.driver.stats().workers[1].suspect
            await system.settle()
        finally:
            await server.stop()


@pytest.mark.parametrize("breach", PROBABILITY_BREACHES)
async def test_malformed_probabilities_make_a_drafter_suspect(
    checkpoints: Checkpoints, breach: str
) -> None:
    """Dropped and counted; the sequence goes on plainly: at temperature 0 with the same text."""
    async with running_system(checkpoints, wait_ms=20.0, drafter_timeout=0.2) as system:
        greedy = replace(OPTIONS, temperature=0.0, max_tokens=20)
        plain = await system.client.generate(PROMPT, replace(greedy, policy="off"))
        hostile = MalformedDrafter(PROBABILITY_BREACHES[breach])
        hostile.kind, hostile.rules = "model", [types_pb2.VERIFICATION_RULE_REJECTION]
        hostile.digest = inspect_checkpoint(checkpoints.target).vocabulary_digest
        server = await serve_lying_drafter(hostile)
        try:
            await system.driver.set_drafters({"bad": server.address})
            await eventually(lambda: "bad" in system.connected())
            options = replace(greedy, policy="lockstep", rule="rejection")
            answer = await system.client.generate(PROMPT, options)
            assert answer.token_ids == plain.token_ids
            assert answer.stats.drafted == 0
            await eventually(lambda: system.driver.stats().workers[1].suspect)
            assert system.driver.stats().workers[1].malformed >= 3
            await system.settle()
        finally:
            await server.stop()


async def test_a_cut_wire_is_noticed_by_keepalive(checkpoints: Checkpoints) -> None:
    """About 2.5 s, long before the drafter's own deadline of 10 s."""
    drafter = await start_drafter(None)
    wire = Wire(drafter.address)
    try:
        async with running_system(checkpoints) as system:
            await system.driver.set_drafters({"far": await wire.open()})
            await eventually(lambda: "far" in system.connected())
            began = time.monotonic()
            wire.cut()
            await eventually(lambda: "far" not in system.connected())
            assert time.monotonic() - began < 6
            assert len((await system.client.generate(PROMPT, OPTIONS)).token_ids) == 120
            await system.driver.set_drafters({})
    finally:
        await wire.close()
        await drafter.stop()


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


async def test_a_hung_drafter_is_left(checkpoints: Checkpoints) -> None:
    async with running_system(checkpoints, drafter_timeout=0.1) as system:
        server = await serve_lying_drafter(HungDrafter())
        try:
            await system.driver.set_drafters({"hung": server.address})
            await eventually(lambda: system.driver.stats().workers[1].reconnects >= 1)
            await system.settle()
        finally:
            await server.stop()


@pytest.mark.parametrize("kind", [HungTarget, LyingTarget])
async def test_a_false_target_is_left(checkpoints: Checkpoints, kind: type[HungTarget]) -> None:
    """It is taken for lost at each step, and requests fail once patience is at its end."""
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
        await eventually(lambda: driver.stats().workers[0].reconnects >= 2)
        generation.cancel()
        await eventually(lambda: driver.scheduler.num_running == 0)
        driver.scheduler.check_integrity()
    finally:
        await driver.stop()
        await target.stop()


async def test_another_vocabulary_at_the_start(checkpoints: Checkpoints, tmp_path: Path) -> None:
    other = make_tiny_checkpoint(tmp_path / "other", vocab_size=300)
    with pytest.raises(VocabularyMismatchError, match=r"d \('other', 300 tokens\).*'target'"):
        async with running_system(checkpoints, drafters={"d": other}):
            pass


async def test_another_vocabulary_later(checkpoints: Checkpoints, tmp_path: Path) -> None:
    other = make_tiny_checkpoint(tmp_path / "other", vocab_size=300)
    drafter = await start_drafter(other)
    try:
        async with running_system(checkpoints) as system:
            await system.driver.set_drafters({"d": drafter.address})
            await asyncio.sleep(0.2)
            assert system.connected() == {"shard-0"}
            assert (await system.client.generate(PROMPT, OPTIONS)).stats.drafted == 0
    finally:
        await drafter.stop()


async def test_another_target_than_the_checkpoint(checkpoints: Checkpoints, tmp_path: Path) -> None:
    other = make_tiny_checkpoint(tmp_path / "other", vocab_size=300)
    target = await start_target(other)
    options = DriverOptions(folder=checkpoints.target, target_addresses=(target.address,))
    try:
        with pytest.raises(VocabularyMismatchError, match="serves 'other'"):
            await serve_driver(options, host=HOST)
    finally:
        await target.stop()


async def test_no_target(checkpoints: Checkpoints) -> None:
    options = DriverOptions(
        folder=checkpoints.target, target_addresses=("127.0.0.1:1",), connect_seconds=0.3
    )
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1 could not be reached"):
        await serve_driver(options, host=HOST)


async def test_a_full_queue(checkpoints: Checkpoints) -> None:
    async with running_system(checkpoints, max_num_seqs=1, max_waiting=1) as system:
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
            await serve_driver(options, host=HOST, port=_port(system.server.address))


async def test_stopping_ends_open_requests(checkpoints: Checkpoints) -> None:
    async with running_system(checkpoints) as system:
        with pytest.raises(UnavailableError):
            await _interrupted(system, OPTIONS, system.driver.stop)

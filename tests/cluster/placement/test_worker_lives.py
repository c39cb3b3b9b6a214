"""Counts of workers that end or fail at everything, and what a driver is told of them."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from cluster.config.model import Config, DrafterConfig, TargetConfig
from cluster.driver import meters
from cluster.driver.driver import Driver, DriverOptions
from cluster.driver.service import serve_driver
from cluster.driver.target_links import StepTimeout
from cluster.placement.lives import LONGEST_PAUSE, MOVE_AFTER, RECENT_SECONDS, RecentEnds
from cluster.placement.plan import Host, plan_placement
from paceline import AsyncClient, WorkerLife
from paceline.errors import PacelineError
from tests.cluster.hostile import HungTarget, LyingTarget, serve_false_target
from tests.cluster.system import (
    HOST,
    Checkpoints,
    eventually,
    make_checkpoints,
    running_system,
    start_target,
)
from workers.engine.load.checkpoint import inspect_checkpoint


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return make_checkpoints(tmp_path_factory.mktemp("lives"))


def test_the_more_often_a_worker_ends_the_longer_is_the_pause() -> None:
    ends = RecentEnds()
    pauses, moves = [], []
    for number in range(1, 13):
        ends.add(10.0 * number)
        pauses.append(ends.pause)
        if ends.wants_another_place:
            moves.append(number)
    assert pauses[:8] == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_PAUSE]
    assert set(pauses[8:]) == {LONGEST_PAUSE}
    assert moves == [MOVE_AFTER, 2 * MOVE_AFTER, 3 * MOVE_AFTER]
    ends.add(10.0 * 12 + RECENT_SECONDS)  # forgotten by then
    assert (ends.pause, ends.wants_another_place) == (0.0, False)


async def test_a_worker_whose_node_is_lost_looks_for_no_other_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray gives its placement group another node, and until then names none."""
    from cluster.placement import workforce
    from cluster.placement.ledger import WorkerSetup

    config = Config(target=TargetConfig(threads=1), drafters=(DrafterConfig(model="demo-draft"),))
    placement = plan_placement(config, [Host("a", 1), Host("b", 1)])
    setup = WorkerSetup(config, tmp_path, host=None)
    force = workforce.Workforce(setup, placement, deployment="one", run="first")
    monkeypatch.setattr(force, "_groups", [object() for _ in placement.groups])
    table = {"bundles_to_node_id": {0: ""}}
    monkeypatch.setattr(workforce, "placement_group_table", lambda group: table)
    for worker in force.workers:
        assert not await force.try_elsewhere(worker)


@pytest.mark.parametrize("kind", [HungTarget, LyingTarget])
async def test_a_target_that_answers_and_fails_every_step_is_told(
    checkpoints: Checkpoints, kind: type[HungTarget]
) -> None:
    """It describes itself at once and answers pings, so nothing else would find it."""
    false = kind(inspect_checkpoint(checkpoints.target).vocabulary_digest)
    target = await serve_false_target(false)
    options = DriverOptions(
        folder=checkpoints.target,
        target_addresses=(target.address,),
        step_timeout=StepTimeout(seconds=0.1, seconds_per_token=0.0),
    )
    driver, server = await serve_driver(options, host=HOST)
    [meter] = driver.meters
    try:
        async with AsyncClient(server.address) as client:
            while not meter.is_failing(0.0):
                with pytest.raises(PacelineError):
                    await client.generate([5, 6], max_tokens=4)
            assert meter.failures >= meters.FAILURES
            assert not meter.is_failing(3600.0)
            assert "failing" not in meter.trouble
            assert meter.trouble
    finally:
        await server.stop()
        await target.stop()


async def test_a_target_that_is_asked_nothing_is_not_failing(checkpoints: Checkpoints) -> None:
    """Its connections may break as often as they like."""
    async with running_system(checkpoints) as system:
        await system.client.generate([5, 6], max_tokens=4)
        [meter] = system.driver.meters

        def has_joined(number: int) -> bool:
            return meter.joins > number

        for number in range(1, meters.FAILURES + 2):
            await system.target.stop()
            port = int(system.target.address.rpartition(":")[2])
            system.target = await start_target(checkpoints.target, port=port)
            await eventually(partial(has_joined, number))
        assert meter.failures == 0
        await system.target.stop()


async def test_a_driver_that_is_starting_hears_where_its_target_went(
    checkpoints: Checkpoints,
) -> None:
    made: list[Driver] = []
    options = DriverOptions(
        folder=checkpoints.target, target_addresses=("127.0.0.1:1",), connect_seconds=120.0
    )
    starting = asyncio.create_task(serve_driver(options, host=HOST, on_made=made.append))
    target = await start_target(checkpoints.target)
    await eventually(lambda: bool(made and made[0].meters and made[0].meters[0].trouble))
    made[0].set_target([target.address])
    _, server = await starting
    try:
        async with AsyncClient(server.address) as client:
            assert (await client.generate([5, 6], max_tokens=4, ignore_eos=True)).token_ids
    finally:
        await server.stop()
        await target.stop()


async def test_what_became_of_the_processes_reaches_callers(checkpoints: Checkpoints) -> None:
    lives = (
        WorkerLife("shard-0", 2, "CUDA error", 100.0, "/logs/run/shard-0.log"),
        WorkerLife("drafter-0", 0),
        WorkerLife("driver", 0, log=str(Path("/logs/run/driver.log"))),
    )
    async with running_system(checkpoints) as system:
        system.driver.note_lives(lives)
        told = (await system.client.stats()).lives
    assert told[1:] == lives[1:]
    assert (told[0].name, told[0].restarts, told[0].last_end) == ("shard-0", 2, "CUDA error")
    assert told[0].next_try_seconds is not None
    assert told[0].next_try_seconds < 100.0  # it counts down

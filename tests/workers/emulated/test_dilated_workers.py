"""Dilated workers: real models in slow motion, and figures in the devices' own time."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest

from cluster.driver import Driver, DriverOptions
from paceline.errors import ConfigError
from paceline.generation import Completion, Stats
from paceline.options import GenerateOptions
from tests.cluster.system import (
    HOST,
    Checkpoints,
    eventually,
    make_checkpoints,
    start_drafter,
    start_target,
)
from tests.workers.emulated.asking import answers, complete
from workers.drafter import DrafterOptions
from workers.emulated.device_clock import MOST_MADE_GOOD, DeviceClock
from workers.emulated.dilated import check_dilation
from workers.emulated.profiles import DeviceProfile, load_profile
from workers.emulated.serve_dilated import serve_dilated_drafter, serve_dilated_target
from workers.engine.engine import Engine
from workers.server import RunningServer
from workers.target_shard import TargetShardOptions

DILATION = 20.0
STEP_SECONDS = 0.001829
"""Of plain decoding of one sequence, by the quick profile below."""
KV_BYTES = 4 * 1024 * 1024
PROMPTS = ([40, 41, 42], [50, 51])


def _quick(name: str) -> DeviceProfile:
    """A profile with a tenth of its times, so that a step takes 37 ms at this dilation."""
    return load_profile(name).scaled(0.1)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return make_checkpoints(tmp_path_factory.mktemp("dilated"))


async def _dilated_pair(checkpoints: Checkpoints) -> tuple[RunningServer, RunningServer]:
    target = TargetShardOptions(folder=checkpoints.target, kv_memory_bytes=KV_BYTES)
    drafter = DrafterOptions(kind="model", folder=checkpoints.drafter, kv_memory_bytes=KV_BYTES)
    return (
        await serve_dilated_target(target, _quick("70b-4xh100"), DILATION, host=HOST),
        await serve_dilated_drafter(drafter, _quick("1b-h100"), DILATION, host=HOST),
    )


@asynccontextmanager
async def _driver(
    checkpoints: Checkpoints, target: RunningServer, drafter: RunningServer, dilation: float
) -> AsyncIterator[Driver]:
    options = DriverOptions(
        folder=checkpoints.target,
        target_addresses=(target.address,),
        drafter_addresses={"drafter-0": drafter.address},
        dilation=dilation,
    )
    driver = Driver(options)
    try:
        await driver.start()
        yield driver
        driver.scheduler.check_integrity()
    finally:
        await driver.stop()
        for server in (target, drafter):
            await server.stop()


async def _answers(driver: Driver, temperature: float, **others: object) -> list[Completion]:
    return await answers(driver, PROMPTS, temperature, max_tokens=12, **others)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_the_text_is_that_of_the_models(checkpoints: Checkpoints, temperature: float) -> None:
    real = await start_target(checkpoints.target), await start_drafter(checkpoints.drafter)
    async with _driver(checkpoints, *real, 1.0) as driver:
        wanted = [one.token_ids for one in await _answers(driver, temperature, policy="off")]
    async with _driver(checkpoints, *await _dilated_pair(checkpoints), DILATION) as driver:
        assert driver.describe().model == "emulated 70b-4xh100, target x20"
        for policy, branches in (("off", 1), ("lockstep", 1), ("chain", 2), ("fanout", 1)):
            found = await _answers(driver, temperature, policy=policy, branches=branches)
            assert [one.token_ids for one in found] == wanted, policy
            if policy == "lockstep":
                assert sum(one.stats.accepted for one in found) > 0


async def test_rules_that_toss_coins_have_real_distributions(checkpoints: Checkpoints) -> None:
    async with _driver(checkpoints, *await _dilated_pair(checkpoints), DILATION) as driver:
        found = await _answers(driver, 1.0, policy="lockstep", rule="rejection", stopping="adaedl")
    assert sum(one.stats.accepted for one in found) > 0


async def test_figures_are_in_the_devices_time(checkpoints: Checkpoints) -> None:
    """What is told of a step is what the profile says; more only by overruns, which are counted."""
    async with _driver(checkpoints, *await _dilated_pair(checkpoints), DILATION) as driver:
        began = time.monotonic()
        before, told_before = driver.stats(), time.monotonic()
        options = GenerateOptions(max_tokens=10, policy="off", ignore_eos=True)
        answer = await complete(driver, PROMPTS[0], options)
        # The last step is counted a moment after its tokens went out.
        all_told = _target(before)[0] + 10 * STEP_SECONDS * 0.999
        await eventually(lambda: _target(driver.stats())[0] >= all_told, 60)
        least_seconds = time.monotonic() - told_before
        after, real_seconds = driver.stats(), time.monotonic() - began
    assert answer.stats.steps == 10
    told = _target(after)[0] - _target(before)[0]
    if not _target(after)[1]:
        assert told == pytest.approx(10 * STEP_SECONDS, rel=1e-3)
    assert answer.stats.seconds < real_seconds / DILATION
    # Each was told at some moment between two readings of the clock.
    told_seconds = DILATION * (after.uptime_seconds - before.uptime_seconds)
    assert 0.999 * least_seconds < told_seconds < 1.001 * real_seconds
    # Passes end by deadline: together they cannot end early but by what one makes good.
    assert real_seconds >= told * DILATION - MOST_MADE_GOOD


def _target(stats: Stats) -> tuple[float, int]:
    (shard,) = (one for one in stats.workers if one.name == "shard-0")
    return shard.busy_seconds, shard.overruns


def test_a_clock_counts_what_the_next_pass_cannot_make_good() -> None:
    clock = DeviceClock(4.0)
    began = time.perf_counter()
    end = clock.finish(clock.now(), 0.01)
    assert time.perf_counter() - began >= 0.04
    assert end <= clock.now()
    begin = clock.now() - 0.5  # half a second of the device's has passed already
    end = clock.finish(begin, 0.1)
    latest = clock.now()
    assert 0.4 - MOST_MADE_GOOD <= clock.overrun_seconds <= latest - begin - 0.1
    assert end == pytest.approx(begin + 0.1 + clock.overrun_seconds, abs=MOST_MADE_GOOD)


def test_a_dilation_that_is_too_small_is_refused(checkpoints: Checkpoints) -> None:
    engine = Engine(checkpoints.target, threads=1, kv_memory_bytes=KV_BYTES)
    profile = load_profile("70b-4xh100")
    # By this clock every pass takes a second, and the emulated ones 18.29 ms times the dilation.
    ticks = count()
    check_dilation(engine, profile, 55.0, tokens=9, clock=lambda: float(next(ticks)))
    with pytest.raises(ConfigError, match=r"dilation is 54: .* 1000\.0 ms here, .* at least 82"):
        check_dilation(engine, profile, 54.0, tokens=9, clock=lambda: float(next(ticks)))
    check_dilation(engine, profile, 1000.0, tokens=9)


async def test_a_worker_that_is_too_slow_ends_before_it_serves(tmp_path: Path) -> None:
    folder = make_checkpoints(tmp_path).target
    too_fast = load_profile("1b-h100").scaled(1e-5)
    options = DrafterOptions(kind="model", folder=folder, kv_memory_bytes=KV_BYTES)
    with pytest.raises(ConfigError, match="too small"):
        await serve_dilated_drafter(options, too_fast, 1.0, host=HOST)

"""Defects in a drafter: of one sequence, of a stream, of its shared pass."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster.broken_drafters import (
    BAD,
    BreaksAtClose,
    BreaksAtCommit,
    BreaksAtOpen,
    BreaksBetweenPasses,
    BreaksInPasses,
    serve_proposer,
)
from tests.cluster.bystanders import bystander
from tests.cluster.interruptions import OPTIONS, PROMPT
from tests.cluster.system import Checkpoints, System, eventually, make_checkpoints, running_system
from workers.drafting.service import MOST_FAILURES
from workers.process.threads import EXIT_BROKEN

pytestmark = pytest.mark.long

LOCKSTEP = replace(OPTIONS, policy="lockstep", max_tokens=40)
TEXT = [5, 6, 7, 8] * 8
"""A prompt that n-grams can continue."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return make_checkpoints(tmp_path_factory.mktemp("defects"))


def reconnects(system: System) -> int:
    return system.driver.stats().workers[1].reconnects


@pytest.mark.parametrize("proposer", [BreaksAtCommit, BreaksAtOpen])
async def test_a_defect_of_one_sequence_declines_that_one_alone(
    checkpoints: Checkpoints, proposer: type[BreaksAtCommit] | type[BreaksAtOpen]
) -> None:
    server = await serve_proposer(proposer())
    try:
        async with running_system(checkpoints, target_rtt_ms=5.0) as system:
            await system.driver.set_drafters({"d": server.address})
            await eventually(lambda: "d" in system.connected())
            async with bystander(system, policy="lockstep") as other:
                for _ in range(3):
                    await system.client.generate(PROMPT, replace(LOCKSTEP, tenant=BAD))
                await other.grows(20)
                drafted = system.driver.scheduler.totals.counts.drafted
                again = await system.client.generate(TEXT, LOCKSTEP)
                assert again.stats.drafted > 0
                assert system.driver.scheduler.totals.counts.drafted > drafted
            assert reconnects(system) == 0
            await system.settle()
    finally:
        await server.stop()


async def test_a_defect_in_the_reader_ends_the_stream_and_the_driver_comes_again(
    checkpoints: Checkpoints,
) -> None:
    """Nothing else would end it: the drafter answers pings, and would read nothing more."""
    server = await serve_proposer(BreaksAtClose())
    try:
        async with running_system(checkpoints, target_rtt_ms=5.0) as system:
            await system.driver.set_drafters({"d": server.address})
            await eventually(lambda: "d" in system.connected())
            async with bystander(system) as other:
                await system.client.generate(PROMPT, replace(LOCKSTEP, tenant=BAD))
                await eventually(lambda: reconnects(system) == 1)
                await other.grows(10)
            assert (await system.client.generate(TEXT, LOCKSTEP)).stats.drafted > 0
            await system.settle()
    finally:
        await server.stop()


@pytest.mark.parametrize("kind", [BreaksInPasses, BreaksBetweenPasses])
async def test_a_defect_in_the_drafting_task_ends_streams_and_drafting_goes_on(
    checkpoints: Checkpoints, kind: type[BreaksInPasses]
) -> None:
    proposer = kind()
    server = await serve_proposer(proposer)
    try:
        async with running_system(checkpoints, target_rtt_ms=5.0) as system:
            await system.driver.set_drafters({"d": server.address})
            await eventually(lambda: "d" in system.connected())
            async with bystander(system, policy="chain") as other:
                await other.grows(30)
                proposer.left = MOST_FAILURES - 1
                await eventually(lambda: reconnects(system) >= MOST_FAILURES - 1)
                assert proposer.left == 0
            assert (await system.client.generate(TEXT, LOCKSTEP)).stats.drafted > 0
            await system.settle()
    finally:
        await server.stop()


_PROCESS = """
import logging
from tests.cluster.broken_drafters import BreaksInPasses, serve_proposer
from workers.process.standalone import run_standalone

logging.basicConfig()
proposer = BreaksInPasses()
proposer.left = 1_000_000
run_standalone(lambda: serve_proposer(proposer))
"""


async def test_passes_that_fail_again_and_again_end_the_process(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """The log has the reason, and an exit code tells the parent to start another process."""
    script = tmp_path / "broken.py"
    script.write_text(_PROCESS, encoding="utf-8")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(script),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"PYTHONPATH": str(Path(__file__).parents[3]), "PATH": ""},
    )
    try:
        assert process.stdout is not None
        address = (await process.stdout.readline()).decode().strip()
        async with running_system(checkpoints, target_rtt_ms=20.0) as system:
            async with bystander(system, max_tokens=400) as other:
                await system.driver.set_drafters({"d": address})
                _, log = await asyncio.wait_for(process.communicate(), 60)
                await other.grows(5)
            await eventually(lambda: "d" not in system.connected())
            await system.settle()
        assert process.returncode == EXIT_BROKEN
        assert f"{MOST_FAILURES} drafting passes in a row failed" in log.decode()
        assert "DefectError('in a pass')" in log.decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()

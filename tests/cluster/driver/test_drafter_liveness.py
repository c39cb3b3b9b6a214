"""What a drafter does to others' speed: floods, silence, and refusals that end."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest

from paceline.v1 import drafting_pb2
from tests.cluster.broken_drafters import Reluctant, serve_proposer
from tests.cluster.bystanders import bystander
from tests.cluster.hostile import FLOODS, Flood, HungDrafter, serve_lying_drafter
from tests.cluster.interruptions import OPTIONS
from tests.cluster.system import (
    Checkpoints,
    eventually,
    make_checkpoints,
    running_system,
    start_drafter,
)

TEXT = [5, 6, 7, 8] * 8
"""A prompt that n-grams can continue."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return make_checkpoints(tmp_path_factory.mktemp("liveness"))


@pytest.mark.parametrize("flood", FLOODS)
async def test_a_flood_makes_its_sender_suspect(
    checkpoints: Checkpoints, flood: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is noticed soon, and little of it is read. A request that ran before gets its text."""
    caplog.set_level(logging.INFO)
    async with running_system(checkpoints, target_rtt_ms=20.0) as system:
        hostile = Flood(FLOODS[flood])
        server = await serve_lying_drafter(hostile)
        try:
            async with bystander(system, max_tokens=400) as other:
                dropped = system.driver.scheduler.totals.dropped_proposals
                await system.driver.set_drafters({"flood": server.address})
                await eventually(lambda: system.driver.stats().workers[1].suspect, 20)
                await other.grows(5)
                dropped = system.driver.scheduler.totals.dropped_proposals - dropped
                assert dropped < 8_000, "some of it is read: what a drafter may tell"
            assert hostile.streams == 1
            assert max(len(record.getMessage()) for record in caplog.records) < 1_000
            await system.settle()
        finally:
            await server.stop()


class SilentDrafter(HungDrafter):
    """Describes itself whenever it is asked, takes all messages, and answers none."""

    async def DescribeDrafter(
        self, request: drafting_pb2.DescribeDrafterRequest, context: Any
    ) -> drafting_pb2.DescribeDrafterResponse:
        return await super(HungDrafter, self).DescribeDrafter(request, context)


async def test_a_drafter_that_answers_nothing_loses_its_sequences_to_another(
    checkpoints: Checkpoints,
) -> None:
    """It answers pings and questions about itself. Its stream stays, since it may recover."""
    silent = SilentDrafter()
    silent.kind = "model"
    server, other_server = await serve_lying_drafter(silent), await start_drafter(None)
    try:
        async with running_system(checkpoints, wait_ms=1500.0, target_rtt_ms=20.0) as system:
            await system.driver.set_drafters({"a": server.address})
            await eventually(lambda: "a" in system.connected())
            options = replace(OPTIONS, policy="lockstep", max_tokens=450)
            asked = asyncio.create_task(system.client.generate(TEXT, options))
            await eventually(lambda: system.driver.scheduler.num_running == 1)
            await system.driver.set_drafters({"a": server.address, "b": other_server.address})
            async with bystander(system, policy="chain"):
                pass
            answer = await asked
            plain = await system.client.generate(TEXT, replace(options, policy="off"))
            assert answer.token_ids == plain.token_ids
            assert answer.stats.drafted > 0, "the other drafter worked for it"
            assert system.driver.stats().workers[1].reconnects == 0
            await system.settle()
    finally:
        await server.stop()
        await other_server.stop()


async def test_a_refused_sequence_is_drafted_for_once_another_has_left(
    checkpoints: Checkpoints,
) -> None:
    """The drafter takes one sequence at a time."""
    proposer = Reluctant(lambda asked: False)
    server = await serve_proposer(proposer, max_sequences=1)
    try:
        async with running_system(checkpoints, target_rtt_ms=10.0) as system:
            await system.driver.set_drafters({"d": server.address})
            await eventually(lambda: "d" in system.connected())
            async with bystander(system, max_tokens=60, policy="chain"):
                options = replace(OPTIONS, policy="lockstep", max_tokens=300)
                waits = asyncio.create_task(system.client.generate(TEXT, options))
            answer = await waits
            assert answer.stats.drafted > 0
            assert proposer.asked <= 4
            await system.settle()
    finally:
        await server.stop()


async def test_a_refused_sequence_is_offered_again_after_a_pause(checkpoints: Checkpoints) -> None:
    """Each pause is longer, so that the drafter is not asked all the time."""
    proposer = Reluctant(lambda asked: asked <= 2)
    server = await serve_proposer(proposer)
    try:
        async with running_system(checkpoints, target_rtt_ms=25.0) as system:
            await system.driver.set_drafters({"d": server.address})
            await eventually(lambda: "d" in system.connected())
            options = replace(OPTIONS, policy="lockstep", max_tokens=450)
            answer = await system.client.generate(TEXT, options)
            assert answer.stats.drafted > 0
            assert proposer.asked == 3
            plain = await system.client.generate(TEXT, replace(options, policy="off"))
            assert answer.token_ids == plain.token_ids
            await system.settle()
    finally:
        await server.stop()

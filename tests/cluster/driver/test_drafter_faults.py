"""Drafters that die, hang, lie or are the wrong ones: equal text, or an error that says why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster.bystanders import bystander
from tests.cluster.hostile import (
    BREACHES,
    PROBABILITY_BREACHES,
    ContradictingDrafter,
    HungDrafter,
    LyingDrafter,
    MalformedDrafter,
    serve_lying_drafter,
)
from tests.cluster.interruptions import OPTIONS, PROMPT, interrupted, plain_answer, port_of
from tests.cluster.system import (
    Checkpoints,
    Wire,
    eventually,
    make_checkpoints,
    running_system,
    start_drafter,
)
from tests.release import at_release
from tests.tiny import make_tiny_checkpoint
from workers.engine.load.checkpoint import inspect_checkpoint


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return make_checkpoints(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("policy", ["chain", "lockstep", "pearl"])
async def test_a_drafter_that_ends_half_way_and_comes_back(
    checkpoints: Checkpoints, policy: str
) -> None:
    """A target that waited for its drafts would wait for a minute."""
    async with running_system(
        checkpoints, drafters={"d": checkpoints.drafter}, wait_ms=60_000.0
    ) as system:
        plain = await plain_answer(system)
        port = port_of(system.drafters["d"].address)
        options = replace(OPTIONS, policy=policy)
        answer, pause = await interrupted(system, options, system.drafters["d"].stop)
        assert answer.token_ids == plain.token_ids
        assert pause < 30
        await eventually(lambda: system.connected() == {"shard-0"})
        restarted = await start_drafter(checkpoints.drafter, port=port)
        try:
            await eventually(lambda: "d" in system.connected())
            assert system.driver.stats().workers[1].reconnects >= 1
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
    """More than a hundred steps of 10 ms remain in which it can be found."""
    async with running_system(
        checkpoints, drafters={"d": checkpoints.drafter}, target_rtt_ms=10
    ) as system:
        options = replace(OPTIONS, policy="lockstep", max_tokens=240)
        plain = await system.client.generate(PROMPT, replace(options, policy="off"))
        fresh = await start_drafter(checkpoints.drafter)
        try:

            async def move() -> None:
                await system.driver.set_drafters({"d": fresh.address})

            answer, _ = await interrupted(system, options, system.drafters["d"].stop, move)
            assert answer.token_ids == plain.token_ids
            assert "draft" in answer.origins[120:]
            worker = system.driver.stats().workers[1]
            assert worker.address == fresh.address
            assert worker.reconnects >= 1
            await system.driver.set_drafters({})
            assert [w.name for w in system.driver.stats().workers] == ["shard-0"]
            await system.settle()
        finally:
            await fresh.stop()


async def test_a_lying_drafter_alters_nothing(checkpoints: Checkpoints) -> None:
    async with running_system(checkpoints, wait_ms=20.0) as system:
        plain = await plain_answer(system)
        liar = LyingDrafter()
        server = await serve_lying_drafter(liar)
        try:
            await system.driver.set_drafters({"liar": server.address})
            await eventually(lambda: "liar" in system.connected())
            for policy in ("chain", "lockstep"):
                answer = await system.client.generate(PROMPT, replace(OPTIONS, policy=policy))
                assert answer.token_ids == plain.token_ids
            await eventually(lambda: liar.told > 100)
            await eventually(lambda: system.driver.scheduler.totals.dropped_proposals > 0)
            assert "liar" in system.connected()
            assert system.driver.stats().workers[1].malformed == 0
            await system.settle()
        finally:
            await server.stop()


@pytest.mark.parametrize("breach", BREACHES)
async def test_malformed_proposals_make_a_drafter_suspect(
    checkpoints: Checkpoints, breach: str, caplog: pytest.LogCaptureFixture
) -> None:
    """After three of them it is not used any more. The text stays right."""
    async with running_system(checkpoints, wait_ms=20.0) as system:
        plain = await plain_answer(system)
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
            # Three long proposals make one message that is too long.
            least = 1 if breach == "too many tokens" else 3
            assert (worker.connected, worker.suspect) == (False, True)
            assert worker.malformed >= least
            lines = [r.getMessage() for r in caplog.records if "is suspect" in r.getMessage()]
            assert len(lines) == 1
            await system.settle()
        finally:
            await server.stop()


async def test_a_suspect_is_left_until_another_process_answers(checkpoints: Checkpoints) -> None:
    """The driver asks it every two seconds for its pid, and takes it back only with another one."""
    async with running_system(checkpoints, drafter_timeout=4.0) as system:
        hostile = MalformedDrafter(BREACHES["huge ids"])
        server = await serve_lying_drafter(hostile)
        try:
            await system.driver.set_drafters({"bad": server.address})
            await eventually(lambda: "bad" in system.connected())
            await system.client.generate(PROMPT, replace(OPTIONS, policy="lockstep"))
            await eventually(lambda: system.driver.stats().workers[1].suspect)
            asked = hostile.asked
            await eventually(lambda: hostile.asked >= asked + 2)
            assert hostile.streams == 1
            assert system.driver.stats().workers[1].suspect
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
    """They are dropped and counted. The sequence decodes plainly, at temperature 0 with the same
    text.
    """
    async with running_system(checkpoints, wait_ms=20.0) as system:
        greedy = replace(OPTIONS, temperature=0.0, max_tokens=20)
        plain = await system.client.generate(PROMPT, replace(greedy, policy="off"))
        hostile = MalformedDrafter(PROBABILITY_BREACHES[breach])
        hostile.kind, hostile.rules = "model", ["rejection"]
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


@pytest.mark.parametrize("rule", ["rejection", "kseq", *at_release(["recursive", "mcsd"])])
async def test_a_liar_with_valid_probabilities_ends_nobodys_step(
    checkpoints: Checkpoints, rule: str
) -> None:
    """Its proposals together fit into no window that a shard accepts, except a chain."""
    digest = inspect_checkpoint(checkpoints.target).vocabulary_digest
    liar = ContradictingDrafter(rule, digest)
    server = await serve_lying_drafter(liar)
    try:
        async with running_system(checkpoints, wait_ms=20.0, target_rtt_ms=5.0) as system:
            greedy = replace(OPTIONS, temperature=0.0, max_tokens=60, rule=rule, policy="lockstep")
            plain = await system.client.generate(PROMPT, replace(greedy, policy="off"))
            branches = 1 if rule == "rejection" else 2
            async with bystander(system, max_tokens=400) as other:
                await system.driver.set_drafters({"liar": server.address})
                await eventually(lambda: "liar" in system.connected())
                for policy in ("lockstep", "chain"):
                    options = replace(greedy, branches=branches, policy=policy)
                    answer = await system.client.generate(PROMPT, options)
                    assert answer.token_ids == plain.token_ids
                if branches > 1:
                    await eventually(lambda: system.driver.stats().workers[1].suspect)
                await other.grows(1)
            target, told = system.driver.stats().workers
            assert target.reconnects == 0
            assert told.malformed >= 3 or branches == 1
            await system.settle()
    finally:
        await server.stop()


async def test_a_cut_wire_is_noticed_by_keepalive(checkpoints: Checkpoints) -> None:
    """It is noticed after about 2.5 s; nothing else would notice it for half an hour."""
    drafter = await start_drafter(None)
    wire = Wire(drafter.address)
    try:
        async with running_system(checkpoints, drafter_timeout=3600.0) as system:
            await system.driver.set_drafters({"far": await wire.open()})
            await eventually(lambda: "far" in system.connected())
            wire.cut()
            await eventually(lambda: "far" not in system.connected())
            assert len((await system.client.generate(PROMPT, OPTIONS)).token_ids) == 120
            await system.driver.set_drafters({})
    finally:
        await wire.close()
        await drafter.stop()


async def test_a_hung_drafter_is_left(checkpoints: Checkpoints) -> None:
    async with running_system(checkpoints, drafter_timeout=0.1) as system:
        server = await serve_lying_drafter(HungDrafter())
        try:
            await system.driver.set_drafters({"hung": server.address})
            await eventually(lambda: system.driver.stats().workers[1].reconnects >= 1)
            await system.settle()
        finally:
            await server.stop()


async def test_another_vocabulary_later(checkpoints: Checkpoints, tmp_path: Path) -> None:
    other = make_tiny_checkpoint(tmp_path / "other", vocab_size=300)
    drafter = await start_drafter(other)
    try:
        async with running_system(checkpoints) as system:
            await system.driver.set_drafters({"d": drafter.address})
            await eventually(lambda: "vocabulary" in system.driver.stats().workers[1].trouble)
            assert system.connected() == {"shard-0"}
            assert (await system.client.generate(PROMPT, OPTIONS)).stats.drafted == 0
    finally:
        await drafter.stop()

"""Requests that a target cannot compute: each is refused alone, and not to be sent again.

Bystanders run when the poison comes and long after it. They must have their texts without it, and
lose what was computed of them at most twice.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from cluster.decoding.batching import Batching
from cluster.decoding.waiting import MOST_LOST_STEPS
from cluster.driver.driver import Driver, DriverOptions
from cluster.driver.service import serve_driver
from paceline import AsyncClient, Chunk, Completion, GenerateOptions, RequestFaultError
from paceline.generation import CompletionBuilder
from tests.cluster.faulty_shard import (
    BREAKS_EVERYTHING,
    BREAKS_THE_DEVICE,
    IS_NO_NUMBER,
    KILLS,
    TAKES_ALL_MEMORY,
    with_nan,
)
from tests.cluster.hostile import MalformedDrafter, serve_lying_drafter
from tests.cluster.shard_processes import ShardProcesses
from tests.cluster.system import HOST, Checkpoints, eventually, running_system, start_drafter
from tests.release import at_release
from tests.tiny import make_tiny_checkpoint
from workers.process.threads import EXIT_BROKEN

PROMPTS = ("The quick brown fox", "A train leaves", "def add(left", "user: hello")
OPTIONS = (
    GenerateOptions(temperature=0.0, max_tokens=150, ignore_eos=True, window=4),
    GenerateOptions(temperature=0.0, max_tokens=150, ignore_eos=True, policy="off"),
    GenerateOptions(
        temperature=0.3, seed=5, max_tokens=150, ignore_eos=True, window=4, policy="lockstep"
    ),
    GenerateOptions(
        temperature=0.3, seed=6, top_k=20, repetition_penalty=1.1, max_tokens=150, ignore_eos=True
    ),
)
PATIENCE = 180.0
"""Seconds that requests wait for a process that is restarted on a busy machine."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_tiny_checkpoint(
        tmp_path_factory.mktemp("poison") / "target", tie_word_embeddings=False
    )
    return with_nan(made)


@dataclass
class Bystanders:
    """Requests that run for long. `texts`: the texts that they have alone."""

    client: AsyncClient
    texts: list[tuple[int, ...]] = field(default_factory=list)
    started: list[asyncio.Event] = field(default_factory=list)
    running: list[asyncio.Task[Completion]] = field(default_factory=list)

    @classmethod
    async def of(cls, client: AsyncClient) -> Bystanders:
        bystanders = cls(client)
        for prompt, options in zip(PROMPTS, OPTIONS, strict=True):
            alone = await client.generate(prompt, replace(options, policy="off"))
            bystanders.texts.append(alone.token_ids)
        return bystanders

    async def start(self) -> None:
        """Start them, and wait until each has some tokens."""
        self.started = [asyncio.Event() for _ in PROMPTS]
        self.running = [
            asyncio.create_task(self._run(index)) for index, _ in enumerate(self.started)
        ]
        await asyncio.gather(*[one.wait() for one in self.started])

    async def check(self, *, still_running: bool = True) -> None:
        """Check that they end with the texts that they have alone."""
        if still_running:
            assert not any(one.done() for one in self.running), "the poison came too late"
        ended = await asyncio.gather(*self.running)
        assert [one.token_ids for one in ended] == self.texts

    async def _run(self, index: int) -> Completion:
        builder = CompletionBuilder()
        async for event in self.client.stream(PROMPTS[index], OPTIONS[index]):
            builder.add(event)
            if isinstance(event, Chunk):
                self.started[index].set()
        return builder.build()


async def poison(client: AsyncClient, token: int, options: GenerateOptions = OPTIONS[0]) -> str:
    """Send a request with this token. Returns why it was refused."""
    with pytest.raises(RequestFaultError) as caught:
        await client.generate([5, 6, token, 7], options)
    return str(caught.value)


def losses(driver: Driver) -> int:
    """How often the target was lost."""
    return driver.stats().workers[0].reconnects


async def settled(driver: Driver) -> None:
    await eventually(lambda: not (driver.scheduler.num_running or driver.scheduler.num_waiting))
    driver.scheduler.check_integrity()
    for group in driver.scheduler._state.groups:
        assert not group.batching.leaving


@pytest.fixture
def hits(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often a sequence lost its computed KV, by sequence."""
    counted: Counter[int] = Counter()
    lose = Batching.lose_target

    def noting(batching: Batching) -> None:
        counted.update(one.sequence_id for one in batching.running.values() if one.kv.length)
        lose(batching)

    monkeypatch.setattr(Batching, "lose_target", noting)
    return counted


async def test_a_row_that_is_no_number_ends_its_own_request(folder: Path) -> None:
    """This holds for each way to choose a token, and no stream breaks."""
    async with running_system(Checkpoints(folder, folder), drafters={"d": folder}) as system:
        bystanders = await Bystanders.of(system.client)
        await bystanders.start()
        for options in (*OPTIONS, replace(OPTIONS[2], rule="rejection", policy="chain")):
            reason = await poison(system.client, IS_NO_NUMBER, options)
            assert "expected finite logits, got nan" in reason
        await bystanders.check()
        assert losses(system.driver) == 0
        await settled(system.driver)
        # The next requests get its blocks.
        await bystanders.start()
        await bystanders.check(still_running=False)


async def test_a_drafter_that_proposes_what_is_no_number_changes_no_text(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a token is in each window of the request under lockstep. Its text stays the same."""
    drafter = await serve_lying_drafter(MalformedDrafter({"token_ids": [IS_NO_NUMBER]}))
    try:
        async with running_system(
            Checkpoints(folder, folder),
            drafter_addresses={"d": drafter.address},
        ) as system:
            bystanders = await Bystanders.of(system.client)
            await bystanders.start()
            await bystanders.check(still_running=False)
            assert "has no verdict: expected finite logits, got nan" in caplog.text
            assert losses(system.driver) == 0
            await settled(system.driver)
    finally:
        await drafter.stop()


@asynccontextmanager
async def served_by(
    shards: ShardProcesses, folder: Path, **drafters: str
) -> AsyncIterator[tuple[Driver, AsyncClient]]:
    options = DriverOptions(
        folder=folder,
        target_addresses=shards.addresses,
        drafter_addresses=drafters,
        target_patience=PATIENCE,
        connect_seconds=PATIENCE,
    )
    driver, server = await serve_driver(options, host=HOST)
    try:
        async with AsyncClient(server.address) as client:
            yield driver, client
    finally:
        await server.stop()


@dataclass
class Restarts:
    """Restarts processes that have ended, as a controller does, and notes how they ended."""

    shards: ShardProcesses
    ended: list[tuple[int, str]] = field(default_factory=list)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        watch = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            for rank, process in enumerate(self.shards.processes):
                if process.poll() is not None:
                    _, log = process.communicate()
                    self.ended.append((process.returncode, log))
                    await asyncio.shield(asyncio.to_thread(self.shards.restart, rank))
            await asyncio.sleep(0.05)


async def hurt(
    folder: Path, token: int, *, degree: int = 1, more_poison: Sequence[int] = ()
) -> tuple[list[str], Restarts, int]:
    """Run bystanders beside poison, at a target that is restarted when its process ends.

    Returns why the poison was refused, how processes ended, and how often the target was lost.
    """
    module = "tests.cluster.faulty_shard"
    with ShardProcesses([folder] * degree, module=module) as shards:
        restarts = Restarts(shards)
        drafter = await start_drafter(None)
        try:
            async with (
                served_by(shards, folder, d=drafter.address) as (driver, client),
                restarts.watching(),
            ):
                bystanders = await Bystanders.of(client)
                await bystanders.start()
                reasons = await asyncio.gather(
                    *[poison(client, one) for one in (token, *more_poison)]
                )
                await bystanders.check()
                await settled(driver)
                return reasons, restarts, losses(driver)
        finally:
            await drafter.stop()


@pytest.mark.long
async def test_a_request_that_kills_the_process_at_each_step(
    folder: Path, hits: Counter[int]
) -> None:
    (reason,), restarts, lost = await hurt(folder, KILLS)
    assert "the target was lost during" in reason
    assert len(restarts.ended) == lost <= 3
    assert max(hits.values()) <= 2


@pytest.mark.long
async def test_a_step_that_runs_out_of_memory(folder: Path, hits: Counter[int]) -> None:
    """The process lives, and streams are opened again."""
    (reason,), restarts, lost = await hurt(folder, TAKES_ALL_MEMORY)
    assert "the target was lost during" in reason
    assert not restarts.ended
    assert lost <= 3
    assert max(hits.values()) <= 2


@pytest.mark.long
async def test_a_request_alone_that_fails_each_step_is_refused_by_a_fresh_process(
    folder: Path,
) -> None:
    with ShardProcesses([folder], module="tests.cluster.faulty_shard") as shards:
        restarts = Restarts(shards)
        async with served_by(shards, folder) as (driver, client), restarts.watching():
            reason = await poison(client, TAKES_ALL_MEMORY)
            assert f"{MOST_LOST_STEPS} steps" in reason
            ((status, log),) = restarts.ended
            assert status == EXIT_BROKEN
            assert "this process ends: 3 steps in a row failed, the last one so: step 1" in log
            assert "can't allocate memory" in log
            await client.generate(PROMPTS[0], OPTIONS[0])
            await settled(driver)


@pytest.mark.release
async def test_two_that_no_target_survives(folder: Path, hits: Counter[int]) -> None:
    """At most twice for each: the one that reaches its first step later is found later."""
    reasons, _, _ = await hurt(folder, KILLS, more_poison=[TAKES_ALL_MEMORY])
    assert all("the target was lost" in reason for reason in reasons)
    assert max(hits.values()) <= 2 * 2


@pytest.mark.long
@pytest.mark.parametrize("token", [BREAKS_THE_DEVICE, *at_release([BREAKS_EVERYTHING])])
async def test_a_broken_device_ends_its_process_which_says_why(
    folder: Path, token: int, hits: Counter[int]
) -> None:
    """This holds whether or not the error names the device."""
    (reason,), restarts, _ = await hurt(folder, token)
    assert "the target was lost during" in reason
    assert restarts.ended
    for status, log in restarts.ended:
        assert status == EXIT_BROKEN
        assert "this process ends: the device does not work any more: step " in log
    assert max(hits.values()) <= 2


@pytest.mark.release
async def test_ranks_stay_in_step_beside_poison(folder: Path) -> None:
    """Rows of NaN, and others in the same steps."""
    with ShardProcesses([folder, folder], module="tests.cluster.faulty_shard") as shards:
        async with served_by(shards, folder) as (driver, client):
            bystanders = await Bystanders.of(client)
            await bystanders.start()
            reasons = await asyncio.gather(
                *[poison(client, IS_NO_NUMBER, options) for options in OPTIONS for _ in range(2)]
            )
            assert all("expected finite logits, got nan" in reason for reason in reasons)
            await bystanders.check()
            assert losses(driver) == 0
            await settled(driver)


@pytest.mark.long
async def test_a_rank_that_fails_and_a_rank_that_dies(folder: Path, hits: Counter[int]) -> None:
    """Both ranks fail at the same token. Neither waits forever in a collective."""
    reasons, _, _ = await hurt(folder, TAKES_ALL_MEMORY, degree=2)
    assert "the target was lost during" in reasons[0]
    assert max(hits.values()) <= 2

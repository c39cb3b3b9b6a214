"""A system is upgraded by one minor version, piece by piece, while requests run.

Each worker and the driver is a process of its own, from a copy of this tree that is marked with a
version: the old one is a minor version below HEAD's.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from paceline import AsyncClient, Chunk, GenerateOptions, Retries
from tests.cluster.builds import DRIVER, Build, minor_version
from tests.cluster.system import HOST, Checkpoints, make_checkpoints
from tests.held_ports import held_port

pytestmark = pytest.mark.long

NUM_REQUESTS = 20
TOKENS = 150
PROMPT = "The quick brown fox jumps"
PATIENT = Retries(attempts=200, most_seconds=0.5)
OLD, NEW, FAR = -1, 0, 1


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return make_checkpoints(tmp_path_factory.mktemp("upgrade"))


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Build]:
    """Builds by their distance to HEAD in minor versions. FAR is two above OLD."""
    return {
        apart: Build.marked(tmp_path_factory.mktemp("build"), minor_version(apart))
        for apart in (OLD, NEW, FAR)
    }


class Pieces:
    """The processes of a system by name: shards "0" and "1", drafters, and the driver."""

    def __init__(self, checkpoints: Checkpoints, builds: dict[int, Build], port: int) -> None:
        self._checkpoints, self._builds, self._port = checkpoints, builds, port
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.prepared: dict[str, subprocess.Popen[str]] = {}
        """Processes that were begun and will take the place of others."""
        self.addresses: dict[str, str] = {}
        self.driver_life = 0

    def begin(self, name: str, apart: int) -> subprocess.Popen[str]:
        """Start a process from the build. It does not serve yet."""
        build, folders = self._builds[apart], self._checkpoints
        if name == "driver":
            self.driver_life += 1
            place = (str(self._port), "it", str(self.driver_life), "2")
            return build.start(str(DRIVER), str(folders.target), *place)
        if name.startswith("shard"):
            module, folder = "workers.target.shard", folders.target
        else:
            module, folder = "workers.drafting.drafter", folders.drafter
        return build.start("-m", module, str(folder), "--kv-memory-mib", "4")

    async def said(self, process: subprocess.Popen[str]) -> str:
        """The next line of a process."""
        assert process.stdout is not None
        line = await asyncio.to_thread(process.stdout.readline)
        if not line:
            raise AssertionError((await asyncio.to_thread(process.communicate))[1])
        return line.strip()

    async def start_all(self, apart: int) -> None:
        names = ["shard-0", "shard-1", "drafter-0", "drafter-1"]
        begun = {name: self.begin(name, apart) for name in [*names, "driver"]}
        self.processes |= begun
        for name in names:
            self.addresses[name] = await self.said(begun[name])
        await self.said(begun["driver"])
        assert (await self.tell()).endswith(minor_version(apart))

    async def tell(self) -> str:
        """Tell the driver where all workers are. Returns what it says."""
        told = {
            "target": [self.addresses["shard-0"], self.addresses["shard-1"]],
            "drafters": {name: self.addresses[name] for name in ("drafter-0", "drafter-1")},
        }
        driver = self.processes["driver"]
        assert driver.stdin is not None
        driver.stdin.write(json.dumps(told) + "\n")
        driver.stdin.flush()
        return await self.said(driver)

    async def replace(self, name: str, apart: int) -> None:
        """Put a process of the build in the place of the present one."""
        old, new = self.processes[name], self.prepared.pop(name, None) or self.begin(name, apart)
        self.processes[f"old {name}"], self.processes[name] = old, new
        said = await self.said(new)
        if name == "driver":
            assert said == "ready"
            old.terminate()
            await asyncio.to_thread(old.communicate)
            assert (await self.tell()).endswith(minor_version(apart))
        else:
            self.addresses[name] = said
            await self.tell()
            old.terminate()
            await asyncio.to_thread(old.communicate)

    def end(self) -> None:
        everyone = [*self.processes.values(), *self.prepared.values()]
        for process in everyone:
            process.kill()
        for process in everyone:
            process.communicate()


@pytest.fixture
def pieces(checkpoints: Checkpoints, builds: dict[int, Build]) -> Iterator[Pieces]:
    with ExitStack() as stack:
        pieces = Pieces(checkpoints, builds, stack.enter_context(held_port()))
        stack.callback(pieces.end)
        yield pieces


@dataclass
class Load:
    """Requests that follow each other without a pause, NUM_REQUESTS at a time.

    `answers`: of the ended ones, by seed. `received`: tokens of each that runs, by place.
    """

    client: AsyncClient
    answers: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    received: dict[int, int] = field(default_factory=dict)
    is_over: bool = False

    async def run(self, place: int) -> None:
        turn = 0
        while not self.is_over:
            seed = place + NUM_REQUESTS * (turn % 2)
            self.answers.append((seed, await self._answer(place, seed)))
            turn += 1

    async def _answer(self, place: int, seed: int) -> tuple[int, ...]:
        token_ids: list[int] = []
        self.received[place] = 0
        async for event in self.client.stream(PROMPT, options(seed)):
            if isinstance(event, Chunk):
                assert event.offset == len(token_ids), "nothing is lost or told twice"
                token_ids += event.token_ids
                self.received[place] = len(token_ids)
        return tuple(token_ids)

    async def is_in_the_middle(self) -> None:
        """Wait until at least half of the places have part of an answer, and not all of it."""
        async with asyncio.timeout(60):
            while sum(0 < one < TOKENS for one in self.received.values()) < NUM_REQUESTS // 2:
                await asyncio.sleep(0.005)


def options(seed: int, policy: str = "chain") -> GenerateOptions:
    return GenerateOptions(
        temperature=1.0, seed=seed, max_tokens=TOKENS, ignore_eos=True, policy=policy, window=4
    )


async def all_are_there_and_draft(client: AsyncClient) -> None:
    """Wait for it: a new driver answers before its drafters are connected."""
    names = {"shard-0", "replica-1.shard-0", "drafter-0", "drafter-1"}
    async with asyncio.timeout(60):
        while True:
            stats = await client.stats()
            if stats.drafted and {one.name for one in stats.workers if one.connected} == names:
                return
            await asyncio.sleep(0.05)


async def test_a_rolling_upgrade_under_load_loses_repeats_and_changes_nothing(
    pieces: Pieces,
) -> None:
    await pieces.start_all(OLD)
    async with AsyncClient(f"{HOST}:{pieces._port}", retries=PATIENT) as client:
        load = Load(client)
        async with asyncio.TaskGroup() as group:
            for place in range(NUM_REQUESTS):
                group.create_task(load.run(place))
            names = ("drafter-0", "drafter-1", "shard-0", "shard-1", "driver")
            pieces.prepared = {name: pieces.begin(name, NEW) for name in names}
            for name in names:
                await load.is_in_the_middle()
                await pieces.replace(name, NEW)
            await load.is_in_the_middle()
            await all_are_there_and_draft(client)
            load.is_over = True
        seeds = sorted({seed for seed, _ in load.answers})
        plain = await asyncio.gather(
            *[client.generate(PROMPT, options(seed, "off")) for seed in seeds]
        )
    expected = {seed: one.token_ids for seed, one in zip(seeds, plain, strict=True)}
    assert len(load.answers) >= NUM_REQUESTS
    assert all(token_ids == expected[seed] for seed, token_ids in load.answers)
    assert len(set(expected.values())) == len(seeds), "the texts differ, so a mix-up would show"


async def test_a_build_two_minor_versions_older_is_refused_by_name(pieces: Pieces) -> None:
    """A drafter and a shard of the old build, and a driver two minor versions above."""
    await pieces.start_all(NEW)
    old = pieces.begin("drafter-0", OLD)
    far = pieces.begin("driver", FAR)
    shard = pieces.begin("shard-0", OLD)
    pieces.processes |= {"old drafter": old, "far driver": far, "old shard": shard}
    async with AsyncClient(f"{HOST}:{pieces._port}", retries=PATIENT) as client:
        # HEAD's driver takes the drafter of the build before.
        pieces.addresses["drafter-0"] = await pieces.said(old)
        await pieces.tell()
        async with asyncio.timeout(60):
            while not {"drafter-0"} <= {
                one.name for one in (await client.stats()).workers if one.connected
            }:
                await asyncio.sleep(0.05)
    # The driver two above takes neither that one nor the shard.
    pieces.processes["driver"].terminate()
    await asyncio.to_thread(pieces.processes["driver"].communicate)
    assert await pieces.said(far) == "ready"
    pieces.addresses["shard-0"] = await pieces.said(shard)
    pieces.processes["driver"] = far
    with pytest.raises(AssertionError, match="VersionMismatchError") as caught:
        await pieces.tell()
    why = str(caught.value)
    assert f"runs Paceline {minor_version(FAR)}" in why
    assert f"the target shard 'shard-0' runs {minor_version(OLD)}" in why
    assert "versions may differ by one minor version; upgrade the older one" in why

"""When an actor counts as lost, on a real Ray cluster."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.long]

HUNG_AFTER = 4.0


class Worker:
    """Answers as cluster/placement/actors.py does, and steps like a busy worker."""

    def __init__(self) -> None:
        self.waits = 0

    async def ping(self) -> int:
        return os.getpid()

    async def wait(self, seconds: float) -> bool:
        self.waits += 1
        await asyncio.sleep(seconds)
        return False

    async def num_waits(self) -> int:
        return self.waits

    async def step(self, seconds: float) -> None:
        time.sleep(seconds)


@contextlib.contextmanager
def an_actor() -> Any:
    import ray

    worker: Any = ray.remote(Worker).options(num_cpus=0, max_concurrency=10).remote()
    ray.get(worker.ping.remote())
    try:
        yield worker
    finally:
        ray.kill(worker)


@pytest.mark.timing
def test_silence_is_hanging_only_where_nobody_hears_of_the_worker(ray_address: str) -> None:
    """A long step silences a worker, while the driver waits for it without complaint."""
    from cluster.placement.lives import QUESTIONS, until_lost

    heard = True
    asked = asyncio.Queue[None]()

    async def is_heard() -> bool:
        asked.put_nowait(None)
        return heard

    async def watch(worker: Any) -> None:
        nonlocal heard
        watching = asyncio.create_task(until_lost(worker, hung_after=HUNG_AFTER, is_heard=is_heard))
        step = worker.step.remote(2 * HUNG_AFTER)
        await asyncio.wait_for(asked.get(), 60)
        assert not watching.done()
        await step
        # One answer to the watch forgives everything, and the watch asks within this time.
        await asyncio.sleep(2 * HUNG_AFTER / QUESTIONS)
        await worker.ping.remote()
        heard = False
        while not asked.empty():
            asked.get_nowait()
        await asyncio.sleep(1.5 * HUNG_AFTER)
        assert (watching.done(), asked.empty()) == (False, True)
        worker.step.remote(120.0)
        why = await asyncio.wait_for(watching, 90)
        assert why == f"it has not answered for {HUNG_AFTER:g} s and counts as hung"
        assert not asked.empty()

    with an_actor() as worker:
        asyncio.run(watch(worker))


class Calls:
    """A method of a Ray actor's handle: each call is a future, which the test ends."""

    def __init__(self) -> None:
        self.open: list[asyncio.Future[None]] = []

    def remote(self, *_: object) -> asyncio.Future[None]:
        self.open.append(asyncio.get_running_loop().create_future())
        return self.open[-1]


@pytest.mark.parametrize("turns", range(6))
def test_a_worker_that_ends_with_a_question_open_is_lost(turns: int) -> None:
    """Both calls fail, some turns of the event loop apart, and none may hide the other.

    A watch that took the failed question for an answer to its own call would ask forever.
    """
    from ray.exceptions import ActorDiedError

    from cluster.placement.lives import until_lost

    worker = SimpleNamespace(ping=Calls(), wait=Calls())

    async def unheard() -> bool:
        return False

    async def watch() -> None:
        watching = asyncio.create_task(until_lost(worker, hung_after=60.0, is_heard=unheard))
        while not (worker.wait.open and worker.ping.open):
            await asyncio.sleep(0)
        worker.wait.open[0].set_exception(ActorDiedError())
        for _ in range(turns):
            await asyncio.sleep(0)
        if not worker.ping.open[0].cancelled():
            worker.ping.open[0].set_exception(ActorDiedError())
        done, _ = await asyncio.wait({watching}, timeout=30.0)
        assert done, "the loss is not told"
        assert "died" in watching.result()

    asyncio.run(watch())


def test_a_broken_connection_is_no_lost_worker(ray_address: str) -> None:
    """Ray calls the actor unavailable, but its process lives. Once killed, it is lost."""
    import ray
    from ray.exceptions import ActorUnavailableError

    from cluster.placement.lives import until_lost

    async def unheard() -> bool:
        return False

    async def watch(worker: Any) -> None:
        pid = await worker.ping.remote()
        watching = asyncio.create_task(until_lost(worker, hung_after=60.0, is_heard=unheard))
        unanswered = asyncio.ensure_future(worker.wait.remote(3600.0))
        while await worker.num_waits.remote() < 2:  # The watch's call and ours.
            await asyncio.sleep(0.05)
        assert break_connections_to(pid)
        with pytest.raises(ActorUnavailableError):
            await unanswered
        await asyncio.sleep(1.0)
        assert not watching.done()
        assert await worker.ping.remote() == pid
        ray.kill(worker)
        assert "died" in await asyncio.wait_for(watching, 60.0)

    with an_actor() as worker:
        asyncio.run(watch(worker))


def break_connections_to(pid: int) -> int:
    """Shut this process's TCP connections to ports of process `pid`. Returns their number."""
    listening = {local for local, state in tcp_sockets_of(pid) if state == "0A"}
    broken = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as one:
            if (
                one.family in (socket.AF_INET, socket.AF_INET6)
                and one.getpeername()[1] in listening
            ):
                one.shutdown(socket.SHUT_RDWR)
                broken += 1
    return broken


def tcp_sockets_of(pid: int) -> list[tuple[int, str]]:
    """Local port and state of each TCP socket of a process, from /proc."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return [(int(row[1].rpartition(":")[2], 16), row[3]) for row in rows if row[9] in inodes]

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

pytestmark = [pytest.mark.ray, pytest.mark.slow]


class Worker:
    """Answers as cluster/actors.py does, and steps as a worker that is busy does."""

    async def ping(self) -> int:
        return os.getpid()

    async def wait(self) -> None:
        await asyncio.Event().wait()

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


def test_silence_is_hanging_only_where_nobody_hears_of_the_worker(ray_address: str) -> None:
    """A long step keeps a worker silent, while the driver waits for it and is content."""
    from cluster.lives import QUESTIONS, longest_silence, until_lost

    heard = True
    asked = 0

    async def is_heard() -> bool:
        nonlocal asked
        asked += 1
        return heard

    async def watch(worker: Any) -> None:
        nonlocal heard
        watching = asyncio.create_task(until_lost(worker, hung_after=1.0, is_heard=is_heard))
        worker.step.remote(3.0)
        await asyncio.sleep(2.5)
        assert asked
        assert not watching.done()
        await worker.ping.remote()  # The step has ended: all is forgiven.
        heard, asked_before = False, asked
        await asyncio.sleep(1.5)
        assert (watching.done(), asked) == (False, asked_before)
        worker.step.remote(10.0)
        why = await asyncio.wait_for(watching, longest_silence(1.0) + 2.0)
        assert why == "it has not answered for 1 s and is taken for hung"

    with an_actor() as worker:
        asyncio.run(watch(worker))
    assert asked > QUESTIONS


class Calls:
    """A method of a handle on an actor, as Ray has it: each call is a future, which we end."""

    def __init__(self) -> None:
        self.open: list[asyncio.Future[None]] = []

    def remote(self) -> asyncio.Future[None]:
        self.open.append(asyncio.get_running_loop().create_future())
        return self.open[-1]


@pytest.mark.parametrize("turns", range(6))
def test_a_worker_that_ends_with_a_question_open_is_lost(turns: int) -> None:
    """Both calls to it fail so many turns of the event loop apart: none may hide the other.

    A watch that took the failed question for an answer to its own end asked for ever.
    """
    from ray.exceptions import ActorDiedError

    from cluster.lives import until_lost

    worker = SimpleNamespace(ping=Calls(), wait=Calls())

    async def unheard() -> bool:
        return False

    async def watch() -> None:
        watching = asyncio.create_task(until_lost(worker, hung_after=60.0, is_heard=unheard))
        await asyncio.sleep(0.01)
        worker.wait.open[0].set_exception(ActorDiedError())
        for _ in range(turns):
            await asyncio.sleep(0)
        if not worker.ping.open[0].cancelled():
            worker.ping.open[0].set_exception(ActorDiedError())
        done, _ = await asyncio.wait({watching}, timeout=1.0)
        assert done, "the loss is not told"
        assert "died" in watching.result()

    asyncio.run(watch())


def test_a_broken_connection_is_no_lost_worker(ray_address: str) -> None:
    """Ray says that the actor is unavailable; its process lives. Killed, it is lost."""
    import ray
    from ray.exceptions import ActorUnavailableError

    from cluster.lives import until_lost

    async def unheard() -> bool:
        return False

    async def watch(worker: Any) -> None:
        pid = await worker.ping.remote()
        watching = asyncio.create_task(until_lost(worker, hung_after=20.0, is_heard=unheard))
        unanswered = asyncio.ensure_future(worker.wait.remote())
        await asyncio.sleep(0.5)
        assert break_connections_to(pid)
        with pytest.raises(ActorUnavailableError):
            await unanswered
        await asyncio.sleep(1.0)
        assert not watching.done()
        assert await worker.ping.remote() == pid
        ray.kill(worker)
        assert "died" in await asyncio.wait_for(watching, 10.0)

    with an_actor() as worker:
        asyncio.run(watch(worker))


def break_connections_to(pid: int) -> int:
    """Shut this process's TCP connections to what another one listens on; how many there were."""
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
    """Local port and state of each, as /proc has them."""
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

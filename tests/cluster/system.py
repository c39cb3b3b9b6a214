"""A whole system on loopback: a target, a model drafter, an n-gram drafter, a driver, a client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.driver import Driver, DriverOptions
from cluster.inference import serve_driver
from paceline import AsyncClient
from tests.tiny import make_tiny_checkpoint
from workers.drafter import DrafterOptions, serve_drafter
from workers.server import RunningServer
from workers.target_shard import TargetShardOptions, serve_target_shard

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Checkpoints:
    """A target and a drafter that agrees with it often: the same weights, rounded to int8."""

    target: Path
    drafter: Path


def make_checkpoints(folder: Path) -> Checkpoints:
    return Checkpoints(
        make_tiny_checkpoint(folder / "target"), make_tiny_checkpoint(folder / "drafter")
    )


async def start_target(folder: Path, *, port: int = 0) -> RunningServer:
    options = TargetShardOptions(folder=folder, kv_memory_bytes=4 * 1024 * 1024)
    return await serve_target_shard(options, host=HOST, port=port)


async def start_drafter(folder: Path | None, *, port: int = 0) -> RunningServer:
    if folder is None:
        options = DrafterOptions(kind="ngram")
    else:
        options = DrafterOptions(kind="model", folder=folder, kv_memory_bytes=4 * 1024 * 1024)
    return await serve_drafter(options, host=HOST, port=port)


@dataclass
class System:
    driver: Driver
    client: AsyncClient
    server: RunningServer
    target: RunningServer
    drafters: dict[str, RunningServer]

    async def settle(self) -> None:
        """Wait until no sequence is left, then check every invariant of the scheduler."""
        await eventually(
            lambda: not (self.driver.scheduler.num_running or self.driver.scheduler.num_waiting)
        )
        self.driver.scheduler.check_integrity()

    def connected(self) -> set[str]:
        return {worker.name for worker in self.driver.stats().workers if worker.connected}


@asynccontextmanager
async def running_system(
    checkpoints: Checkpoints,
    *,
    drafters: dict[str, Path | None] | None = None,
    more_targets: tuple[str, ...] = (),
    **options: Any,
) -> AsyncIterator[System]:
    """`drafters`: a checkpoint folder by name, None for n-gram. `options`: of the driver.

    `more_targets`: addresses of shards after the first.
    """
    async with AsyncExitStack() as stack:
        target = await start_target(checkpoints.target)
        stack.push_async_callback(target.stop)
        servers = {}
        for name, folder in (drafters or {}).items():
            servers[name] = await start_drafter(folder)
            stack.push_async_callback(servers[name].stop)
        wanted = DriverOptions(
            folder=checkpoints.target,
            target_addresses=(target.address, *more_targets),
            drafter_addresses={name: server.address for name, server in servers.items()},
        )
        driver, server = await serve_driver(replace(wanted, **options), host=HOST)
        stack.push_async_callback(server.stop)
        client = await stack.enter_async_context(AsyncClient(server.address))
        yield System(driver, client, server, target, servers)


async def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for a condition. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)

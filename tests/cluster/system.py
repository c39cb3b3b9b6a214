"""A whole system on loopback: a target, a model drafter, an n-gram drafter, a driver, a client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.access.gate import Gate
from cluster.driver.driver import Driver, DriverOptions
from cluster.driver.service import serve_driver
from paceline import AsyncClient, Retries
from paceline.access import Access
from tests.held_ports import held_port
from tests.tiny import make_tiny_checkpoint
from workers.drafting.drafter import serve_drafter
from workers.drafting.kind import DrafterOptions
from workers.drafting.kinds.model import ModelOptions
from workers.emulated.latency_profiles import LinkProfile
from workers.emulated.relay import Relay
from workers.process.certificate import Certificate
from workers.process.mutual_tls import WorkerTls
from workers.process.server import RunningServer
from workers.target.shard import TargetShardOptions, serve_target_shard

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Checkpoints:
    """A target and a drafter that often agrees with it: the same weights, rounded to int8."""

    target: Path
    drafter: Path


def make_checkpoints(folder: Path) -> Checkpoints:
    return Checkpoints(
        make_tiny_checkpoint(folder / "target"), make_tiny_checkpoint(folder / "drafter")
    )


async def start_target(
    folder: Path, *, port: int = 0, kv_memory_mib: int = 4, tls: WorkerTls | None = None
) -> RunningServer:
    options = TargetShardOptions(folder=folder, kv_memory_bytes=kv_memory_mib * 1024 * 1024)
    return await serve_target_shard(options, host=HOST, port=port, tls=tls)


DrafterChoice = Path | str | None
"""A model drafter by its folder (named parallel, or learning, one that is), or a drafter without a
model by its kind; None: n-grams."""


async def start_drafter(
    choice: DrafterChoice,
    *,
    port: int = 0,
    max_sequences: int = 64,
    tls: WorkerTls | None = None,
    labels: Mapping[str, str] | None = None,
) -> RunningServer:
    if isinstance(choice, Path):
        kind = "parallel" if choice.name == "parallel" else "model"
        options = DrafterOptions(kind=kind, folder=choice, kv_memory_bytes=4 * 1024 * 1024)
        if choice.name == "learning":
            options = replace(options, of_kind=ModelOptions(learn=True))
    else:
        options = DrafterOptions(kind=choice or "ngram")
    options = replace(options, max_sequences=max_sequences, labels=labels or {})
    return await serve_drafter(options, host=HOST, port=port, tls=tls)


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
    drafters: Mapping[str, DrafterChoice] | None = None,
    more_targets: tuple[str, ...] = (),
    target_rtt_ms: float = 0.0,
    kv_memory_mib: int = 4,
    gate: Gate | None = None,
    certificate: Certificate | None = None,
    access: Access | None = None,
    tls: Path | None = None,
    **options: Any,
) -> AsyncIterator[System]:
    """Run a system with all its workers connected.

    What ends workers may start others at their ports. `drafters`: by name. `options`: of the
    driver. `more_targets`: addresses of shards after the first. `target_rtt_ms`: round trip to the
    target. `kv_memory_mib`: of the target. `gate`, `certificate`: of the driver. `access`: of the
    client. `tls`: the folder of all workers and the driver, which also has an inner port then.
    """
    async with AsyncExitStack() as stack:
        port = stack.enter_context(held_port())
        target = await start_target(
            checkpoints.target, port=port, kv_memory_mib=kv_memory_mib, tls=WorkerTls.of(tls)
        )
        stack.push_async_callback(target.stop)
        target_address = target.address
        if target_rtt_ms:
            relay = Relay(target.address, LinkProfile(rtt_ms=target_rtt_ms))
            stack.callback(relay.close)
            target_address = relay.address
        servers = {}
        for name, folder in (drafters or {}).items():
            port = stack.enter_context(held_port())
            servers[name] = await start_drafter(folder, port=port, tls=WorkerTls.of(tls))
            stack.push_async_callback(servers[name].stop)
        wanted = DriverOptions(
            folder=checkpoints.target,
            target_addresses=(target_address, *more_targets),
            drafter_addresses={name: server.address for name, server in servers.items()},
            tls=WorkerTls.of(tls),
        )
        driver, server = await serve_driver(
            replace(wanted, **options),
            host=HOST,
            gate=gate,
            certificate=certificate,
            inner_host=None if tls is None else HOST,
        )
        stack.push_async_callback(server.stop)
        once = Retries(0)  # Each attempt is seen.
        client = await stack.enter_async_context(
            AsyncClient(server.address, retries=once, **(access or {}))
        )
        system = System(driver, client, server, target, servers)
        await eventually(lambda: system.connected() >= servers.keys())
        yield system


class Wire:
    """A TCP relay to an address. Cut, it passes nothing, and neither side is told.

    Held, it keeps everything until it is released. `num_accepted`: connections that were accepted.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self.num_accepted = 0
        self._cut = False
        self._passing = asyncio.Event()
        self._passing.set()
        self._relays: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def open(self) -> str:
        """Start the relay. Returns the address to connect to."""
        self._server = await asyncio.start_server(self._accept, HOST, 0)
        return f"{HOST}:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Pass nothing any more."""
        self._cut = True

    def reset(self) -> None:
        """Break all connections. Further ones are accepted."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def hold(self) -> None:
        """Keep everything that comes until `release`."""
        self._passing.clear()

    def release(self) -> None:
        """Pass on what was held and what comes."""
        self._passing.set()

    async def close(self) -> None:
        self._server.close()
        for relay in self._relays:
            relay.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*(w.wait_closed() for w in self._writers), return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_accepted += 1
        host, _, port = self._address.rpartition(":")
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        except OSError:  # Nothing listens there now.
            writer.close()
            return
        self._writers += [writer, far_writer]
        for pair in ((reader, far_writer), (far_reader, writer)):
            self._relays.add(asyncio.create_task(self._relay(*pair)))

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while passed := await reader.read(65536):
                await self._passing.wait()
                if not self._cut:
                    writer.write(passed)
        if not self._cut:
            writer.close()


async def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until the condition holds, long enough for a busy machine. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)

"""The controller: a Ray actor that starts a deployment's workers and watches their lives.

It owns the workers: when it ends, Ray ends them. It restarts a worker that dies or hangs
(cluster/placement/revival.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass

from ray.exceptions import RayError

from cluster.placement.actor_calls import outcome_of
from cluster.placement.actors import WorkerSetup
from cluster.placement.plan import Placement
from cluster.placement.revival import Revival
from cluster.placement.workforce import DRIVER, Worker, Workforce
from paceline.generation import WorkerLife

_log = logging.getLogger(__name__)
_log.setLevel(logging.INFO)
_PROGRESS_SECONDS = 1.0
_STOP_SECONDS = 2.0
_LAST_WORD_SECONDS = 0.5
"""Time for the last messages to reach callers."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker as the controller sees it. `address` and `pid` are None while it starts.

    `inner_address`: where a driver serves gateways of its own deployment; None: at `address`.
    """

    name: str
    kind: str
    address: str | None
    pid: int | None
    restarts: int
    inner_address: str | None = None


class Controller:
    """Runs in a Ray actor of its own. All methods are called through Ray."""

    def __init__(self, setup: WorkerSetup, placement: Placement) -> None:
        if (log := setup.log_of("controller")) is not None:
            log.open()
        self._workforce = Workforce(setup, placement)
        self._lines: list[str] = []
        self._watches: list[asyncio.Task[None]] = []

    async def bring_up(self) -> str:
        """Start all workers, then the driver. Returns the address of InferenceService.

        Raises the PacelineError of the first that fails. The caller then ends this actor.
        """
        workforce, driver = self._workforce, self._workforce.driver
        workforce.states = {worker.name: "has not started" for worker in workforce.workers}
        workforce.states[DRIVER] = "waits for the others"
        await workforce.reserve()
        if workforce.gateway is not None:
            workforce.make(workforce.gateway)
        workforce.make(driver)
        preparing = driver.handle.prepare.remote(workforce.setup)
        for worker in workforce.workers:
            workforce.make(worker)
        telling = asyncio.create_task(self._tell_progress())
        try:
            async with asyncio.TaskGroup() as group:
                if workforce.gateway is not None:
                    group.create_task(self._serve_http(workforce.gateway))
                for worker in workforce.workers:
                    group.create_task(self._first_serve(worker))
        finally:
            telling.cancel()
        self._say("driver: connecting")
        workforce.states[DRIVER] = "connects to the others"
        await workforce.tell_gateway()
        await outcome_of(preparing, DRIVER)
        began = time.monotonic()
        await workforce.serve(driver, workforce.setup.config.server.grpc_port)
        self._say(f"driver: serving after {time.monotonic() - began:.1f} s")
        await driver.handle.note_lives.remote(workforce.lives())
        workforce.states.clear()
        await workforce.tell_gateway(drivers=True)
        revival = Revival(workforce)
        self._watches += [asyncio.create_task(revival.watch(one)) for one in workforce.all]
        assert driver.address is not None
        return driver.address

    async def progress(self, seen: int) -> list[str]:
        """The progress lines after the first `seen`."""
        return self._lines[seen:]

    async def address(self) -> str | None:
        """Address of InferenceService; None: it does not serve yet."""
        return self._workforce.driver.address

    async def http_address(self) -> str | None:
        """Address of the HTTP interface, "host:port"; None: there is none."""
        gateway = self._workforce.gateway
        return None if gateway is None else gateway.address

    async def workers(self) -> list[WorkerStatus]:
        """All workers, the driver last."""
        return [
            WorkerStatus(
                name=worker.name,
                kind=worker.kind,
                address=worker.address,
                pid=None if worker.serving is None else worker.serving.pid,
                restarts=worker.restarts,
                inner_address=None if worker.serving is None else worker.serving.inner_address,
            )
            for worker in self._workforce.all
        ]

    async def lives(self) -> list[WorkerLife]:
        """The history of all workers' processes, the driver's last."""
        return self._workforce.lives()

    async def stop(self, drain_seconds: float = 0.0) -> int:
        """End all workers and free what they reserved.

        First take no more requests, and give running ones `drain_seconds` to end. Returns how many
        did not end in time.
        """
        driver, left, grace = self._workforce.driver, 0, None
        gateway = self._workforce.gateway
        if driver.serving is not None and drain_seconds > 0:
            with contextlib.suppress(RayError, TimeoutError):
                async with asyncio.timeout(drain_seconds + _STOP_SECONDS):
                    if gateway is not None and gateway.serving is not None:
                        gateway.handle.drain.remote(drain_seconds)
                    left = await driver.handle.drain.remote(drain_seconds)
            grace = _LAST_WORD_SECONDS
        for watch in self._watches:
            watch.cancel()
        for worker in (gateway, driver):
            if worker is not None and worker.serving is not None:
                with contextlib.suppress(RayError, TimeoutError):
                    await asyncio.wait_for(worker.handle.stop.remote(grace), _STOP_SECONDS)
        self._workforce.release()
        return left

    async def _first_serve(self, worker: Worker) -> None:
        assert worker.plan is not None
        plan = worker.plan
        self._say(f"{plan.name}: loading {plan.model or plan.kind}, threads {plan.threads}")
        self._workforce.states[plan.name] = f"loads {plan.model or plan.kind}"
        began = time.monotonic()
        await self._workforce.serve(worker, 0)
        seconds = time.monotonic() - began
        self._say(f"{plan.name}: serving after {seconds:.1f} s")
        self._workforce.states[plan.name] = "is ready"
        await self._workforce.tell_gateway()
        if worker.is_shard:
            self._workforce.load_seconds = max(self._workforce.load_seconds, seconds)

    async def _serve_http(self, gateway: Worker) -> None:
        await self._workforce.serve(gateway, self._workforce.setup.config.server.http_port)
        self._say(f"gateway: HTTP at {gateway.address}")
        await self._workforce.tell_gateway()

    async def _tell_progress(self) -> None:
        """Report each shard's loading progress, in steps of a quarter."""
        shards = self._workforce.shards
        said = dict.fromkeys((shard.name for shard in shards), 0)
        while True:
            await asyncio.sleep(_PROGRESS_SECONDS)
            for shard in shards:
                with contextlib.suppress(RayError):
                    done, total = await shard.handle.progress.remote()
                    quarters = 4 * done // max(total, 1)
                    loaded = f"{done >> 20} of {total >> 20} MiB"
                    if said[shard.name] < quarters < 4:
                        self._say(f"{shard.name}: {loaded} loaded")
                    if total and shard.serving is None:
                        self._workforce.states[shard.name] = f"has loaded {loaded}"
                    said[shard.name] = max(said[shard.name], quarters)
            await self._workforce.tell_gateway()

    def _say(self, line: str) -> None:
        _log.info("%s", line)
        self._lines.append(line)

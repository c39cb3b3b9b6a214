"""The controller: one Ray actor that brings up a deployment's workers and watches their lives.

It owns them: when it ends, Ray ends them. A worker that dies or hangs is started again in its
place, or on another node where its own is lost. A drafter gets a new address, which the driver is
told; a shard and the driver come back at the port that they had. Of a target's shards only those
that were lost are started again: the driver brings the group together anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.actor_calls import outcome_of
from cluster.actors import DrafterActor, DriverActor, Serving, ShardActor, WorkerSetup
from cluster.lives import longest_silence, until_lost, until_started
from cluster.placement import Placement, WorkerPlan
from paceline.errors import PacelineError, UnavailableError, WorkerLostError

ROOM_SECONDS = 30.0
"""How long the cluster may take to set aside what the plan reserves."""
_DRIVER = "driver"
_LONGEST_WAIT = 30.0
_DRIVER_SECONDS = 5.0
_LOOK_SECONDS = 0.2
_ANSWERS_AT_ONCE = 100
_PROGRESS_SECONDS = 1.0
_PATIENCE_OF_LOADS = 3.0
"""Requests wait for a lost target as long as this many loads of its slowest shard took, after the
time in which a shard that hangs is found."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker as the controller sees it. `address` and `pid` are None while it is starting."""

    name: str
    kind: str
    address: str | None
    pid: int | None
    restarts: int


@dataclass(slots=True)
class _Worker:
    name: str
    plan: WorkerPlan | None
    handle: Any = None
    serving: Serving | None = None
    restarts: int = 0
    restarting: bool = False

    @property
    def address(self) -> str | None:
        return None if self.serving is None else self.serving.address

    @property
    def port(self) -> int:
        return 0 if self.serving is None else int(self.serving.address.rpartition(":")[2])


class Controller:
    """Lives in a Ray actor of its own; all methods are called through Ray."""

    def __init__(self, setup: WorkerSetup, placement: Placement) -> None:
        self._setup = setup
        self._placement = placement
        self._groups: list[PlacementGroup] = []
        self._workers = [_Worker(plan.name, plan) for plan in placement.workers]
        self._driver = _Worker(_DRIVER, None)
        self._lines: list[str] = []
        self._load_seconds = 0.0
        """What the slowest shard took to serve."""
        self._watches: list[asyncio.Task[None]] = []
        self._stopping = False

    async def bring_up(self) -> str:
        """Start all workers, then the driver; return the address of InferenceService.

        Raises the PacelineError of the first that fails. The caller then ends this actor.
        """
        await self._reserve()
        self._driver.handle = self._make_actor(None)
        preparing = self._driver.handle.prepare.remote(self._setup)
        for worker in self._workers:
            worker.handle = self._make_actor(worker.plan)
        telling = asyncio.create_task(self._tell_progress())
        try:
            async with asyncio.TaskGroup() as group:
                for worker in self._workers:
                    group.create_task(self._first_serve(worker))
        finally:
            telling.cancel()
        self._say("driver: connecting")
        await outcome_of(preparing, _DRIVER)
        began = time.monotonic()
        await self._serve(self._driver, self._setup.config.server.grpc_port)
        self._say(f"driver: serving after {time.monotonic() - began:.1f} s")
        assert self._driver.serving is not None
        for worker in (*self._workers, self._driver):
            self._watches.append(asyncio.create_task(self._watch(worker)))
        return self._driver.serving.address

    async def progress(self, seen: int) -> list[str]:
        """The lines of progress after the first `seen`."""
        return self._lines[seen:]

    async def address(self) -> str | None:
        """Where InferenceService is, once it serves."""
        return None if self._driver.serving is None else self._driver.serving.address

    async def workers(self) -> list[WorkerStatus]:
        """All workers, the driver last."""
        return [
            WorkerStatus(
                name=worker.name,
                kind=_DRIVER if worker.plan is None else worker.plan.kind,
                address=worker.address,
                pid=None if worker.serving is None else worker.serving.pid,
                restarts=worker.restarts,
            )
            for worker in (*self._workers, self._driver)
        ]

    async def stop(self) -> None:
        """End all workers and give back what they reserved."""
        self._stopping = True
        for watch in self._watches:
            watch.cancel()
        if self._driver.serving is not None:
            with contextlib.suppress(RayError, TimeoutError):
                await asyncio.wait_for(self._driver.handle.stop.remote(), 2.0)
        for worker in (self._driver, *self._workers):
            if worker.handle is not None:
                ray.kill(worker.handle)
        for group in self._groups:
            remove_placement_group(group)

    async def _reserve(self) -> None:
        for plan in self._placement.groups:
            self._groups.append(placement_group(list(plan.bundles), strategy=plan.strategy))
        for plan, group in zip(self._placement.groups, self._groups, strict=True):
            if not await asyncio.to_thread(group.wait, ROOM_SECONDS):
                raise UnavailableError(
                    f"the cluster did not set aside {list(plan.bundles)} ({plan.strategy}) within "
                    f"{ROOM_SECONDS:g} s; free are {ray.available_resources()}"
                )

    def _make_actor(self, plan: WorkerPlan | None) -> Any:
        kind: type = DriverActor
        if plan is not None:
            kind = ShardActor if plan.kind == "target" else DrafterActor
        return (
            ray.remote(kind)
            .options(
                num_cpus=plan.reserved_cpus if plan else 0,
                num_gpus=plan.reserved_gpus if plan else 0,
                max_concurrency=_ANSWERS_AT_ONCE,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._groups[plan.group if plan else 0],
                    placement_group_bundle_index=plan.bundle if plan else 0,
                ),
            )
            .remote()
        )

    async def _first_serve(self, worker: _Worker) -> None:
        assert worker.plan is not None
        plan = worker.plan
        self._say(f"{plan.name}: loading {plan.model or plan.kind}, threads {plan.threads}")
        began = time.monotonic()
        await self._serve(worker, 0)
        seconds = time.monotonic() - began
        self._say(f"{plan.name}: serving after {seconds:.1f} s")
        if plan.kind == "target":
            self._load_seconds = max(self._load_seconds, seconds)

    async def _serve(self, worker: _Worker, port: int) -> None:
        """Have the worker's actor serve. Raises its PacelineError, or WorkerLostError."""
        if worker.plan is not None:
            call = worker.handle.serve.remote(self._setup, worker.plan, port)
        else:
            call = worker.handle.serve.remote(
                self._setup,
                self._target_addresses(),
                self._drafter_addresses(),
                port,
                patience=_PATIENCE_OF_LOADS * self._load_seconds
                + longest_silence(self._setup.config.target.hung_after),
            )
        worker.serving = await outcome_of(call, worker.name)

    async def _tell_progress(self) -> None:
        """Say for each shard how much of its share is loaded, a quarter at a time."""
        said = dict.fromkeys((worker.name for worker in self._shards), 0)
        while True:
            await asyncio.sleep(_PROGRESS_SECONDS)
            for worker in self._shards:
                with contextlib.suppress(RayError):
                    done, total = await worker.handle.progress.remote()
                    quarters = 4 * done // max(total, 1)
                    if said[worker.name] < quarters < 4:
                        self._say(f"{worker.name}: {done >> 20} of {total >> 20} MiB loaded")
                    said[worker.name] = max(said[worker.name], quarters)

    @property
    def _shards(self) -> list[_Worker]:
        """Of all target groups, group by group, each by rank."""
        return [one for one in self._workers if one.plan is not None and one.plan.kind == "target"]

    def _target_addresses(self) -> list[str]:
        return [worker.serving.address for worker in self._shards if worker.serving is not None]

    def _drafter_addresses(self) -> dict[str, str]:
        return {
            worker.name: worker.serving.address
            for worker in self._workers
            if worker.plan is not None
            and worker.plan.kind != "target"
            and worker.serving is not None
        }

    async def _watch(self, worker: _Worker) -> None:
        """Start the worker again whenever it is lost."""
        while not self._stopping:
            why = await until_lost(
                worker.handle,
                hung_after=self._setup.config.target.hung_after,
                is_heard=partial(self._is_heard, worker),
            )
            _log.warning("%s is lost (%s); starting it again", worker.name, why)
            await self._revive(worker)

    async def _is_heard(self, worker: _Worker) -> bool:
        """Whether the driver has open streams to the worker and no answer is overdue."""
        if worker.plan is None:
            return False
        try:
            connected = self._driver.handle.connected.remote()
            return worker.name in await asyncio.wait_for(connected, _DRIVER_SECONDS)
        except (RayError, TimeoutError):
            return False

    async def _revive(self, worker: _Worker) -> None:
        wait = 0.5
        port, address = worker.port, worker.address
        is_drafter = worker.plan is not None and worker.plan.kind != "target"
        while True:
            worker.restarting = True
            ray.kill(worker.handle)
            worker.handle = self._make_actor(worker.plan)
            try:
                number = worker.plan.group if worker.plan else 0
                starting = until_started(
                    worker.handle,
                    worker.name,
                    self._placement.groups[number],
                    self._groups[number],
                )
                await outcome_of(starting, worker.name)
                if worker is self._driver:
                    await self._until_shards_serve()
                await self._serve(worker, 0 if is_drafter else port)
                worker.restarting = False
                if worker.address != address or worker is self._driver:
                    await self._tell_driver(worker)
            except PacelineError as error:
                _log.warning("%s: cannot be started again yet: %s", worker.name, error)
                await self._tell_trouble(worker, error)
                await asyncio.sleep(wait)
                wait = min(2 * wait, _LONGEST_WAIT)
                continue
            worker.restarts += 1
            _log.warning("%s: serving again", worker.name)
            return

    async def _tell_driver(self, revived: _Worker) -> None:
        """Tell where the worker is now: on another host perhaps, where its own is lost.

        A driver that is lost as well is told when it is started again; others may have moved while
        it started.
        """
        driver, calls = self._driver.handle, []
        if revived.plan is None or revived.plan.kind == "target":
            calls.append(driver.set_target.remote(self._target_addresses()))
        if revived.plan is None or revived.plan.kind != "target":
            calls.append(driver.set_drafters.remote(self._drafter_addresses()))
        with contextlib.suppress(WorkerLostError):
            for call in calls:
                await outcome_of(call, _DRIVER)

    async def _tell_trouble(self, worker: _Worker, error: PacelineError) -> None:
        """Tell the driver, where it lives, why a shard stays away: requests that fail say so."""
        if worker in self._shards:
            with contextlib.suppress(PacelineError, TimeoutError):
                call = self._driver.handle.note_target.remote(str(error))
                await asyncio.wait_for(outcome_of(call, _DRIVER), _DRIVER_SECONDS)

    async def _until_shards_serve(self) -> None:
        """Wait for those that are being started again: a driver would look at old addresses."""
        while any(shard.restarting for shard in self._shards):
            await asyncio.sleep(_LOOK_SECONDS)

    def _say(self, line: str) -> None:
        self._lines.append(line)

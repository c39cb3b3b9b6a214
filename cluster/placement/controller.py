"""The controller: a Ray actor that starts a deployment's workers and watches their lives.

It starts a worker again that dies or hangs (cluster/placement/revival.py). Ray starts the
controller again if its own process dies. It then reads the ledger (cluster/placement/ledger.py) and
takes over the workers that run, which did not notice.

A deployment may have an owner, the process that started it. The owner made the placement groups, so
that Ray ends all workers when it ends, in whatever way; the controller then removes the rest. A
deployment without an owner ends when it is told to, or if its starter goes before it is up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError

from cluster.config.model import Config
from cluster.placement.actor_calls import outcome_of
from cluster.placement.change import plan_change
from cluster.placement.ledger import Ledger, WorkerSetup, read_ledger
from cluster.placement.plan import Placement, bundle_of
from cluster.placement.revival import Revival
from cluster.placement.workforce import DRIVER, Worker, Workforce
from paceline.errors import UnavailableError, WorkerLostError
from paceline.generation import WorkerLife
from workers.drafting.fair_shares import ShareUse

_log = logging.getLogger(__name__)
_log.setLevel(logging.INFO)
STARTER_SECONDS = 30.0
"""A starter that has not asked for this long counts as gone. It asks several times a second."""
_PROGRESS_SECONDS = 1.0
_LOOK_SECONDS = 1.0
_STOP_SECONDS = 2.0
_LEAVE_SECONDS = 5.0
"""A caller that has ended the deployment ends this actor at once, unless the caller has died."""
_ANOTHER_TRY_SECONDS = 5.0
_CHANGE = "a change"
_JOIN_SECONDS = 1500.0
"""How long a worker that joins may take to load."""
_CONNECT_SECONDS = 120.0
"""How long the driver may take to connect to a target group that serves. Its shards meet."""
_RETIRE_SECONDS = 1200.0
"""How long sequences may go on in a target group that leaves, if no other has room for them."""
_LAST_WORD_SECONDS = 0.5
"""Time for the last messages to reach callers."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker as the controller sees it. `address` and `pid` are None while it starts."""

    name: str
    kind: str
    address: str | None
    pid: int | None
    restarts: int
    uses: Sequence[ShareUse] = ()
    """What each party uses of a drafter of a pool."""


class Controller:
    """Runs in a Ray actor of its own. All methods are called through Ray."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it.
        self,
        deployment: str,
        run: str,
        setup: WorkerSetup,
        placement: Placement,
        groups: Sequence[str] | None,
    ) -> None:
        """See Workforce. Ray calls this again, with the same values, in each new process."""
        if (log := setup.log_of("controller")) is not None:
            log.open()
        self._workforce = Workforce(setup, placement, deployment=deployment, run=run, groups=groups)
        self._deployment, self._groups = deployment, groups
        self._lines: list[str] = []
        self._watches: dict[str, asyncio.Task[Any]] = {}
        """What must end before the workers do: the watch of each by its name, and a change."""
        self._heard_at = time.monotonic()
        self._adopted = asyncio.Event()
        self._tasks = [asyncio.create_task(one) for one in (self._until_left(), self._begin())]

    async def bring_up(self) -> str:
        """Start all workers, then the driver. Returns the address of InferenceService.

        That of a pool, which has no driver, is "".
        Raises the PacelineError of the first that fails. The caller then ends this actor.
        """
        await self._adopted.wait()
        workforce, driver = self._workforce, self._workforce.driver
        self._heard_at = time.monotonic()
        workforce.states = {worker.name: "has not started" for worker in workforce.workers}
        await workforce.reserve()
        if workforce.gateway is not None:
            workforce.make(workforce.gateway)
        preparing = None
        if driver is not None:
            workforce.states[DRIVER] = "waits for the others"
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
                if preparing is not None:
                    # What is wrong with its files is told before weights are loaded.
                    group.create_task(outcome_of(preparing, DRIVER))
        finally:
            telling.cancel()
        if driver is not None:
            await self._serve_driver(driver)
        workforce.states.clear()
        await workforce.tell_gateway(drivers=True)
        workforce.phase = "runs"
        workforce.save()
        self._watch(workforce.all)
        return "" if driver is None or driver.address is None else driver.address

    async def _serve_driver(self, driver: Worker) -> None:
        workforce = self._workforce
        self._say("driver: connecting")
        workforce.states[DRIVER] = "connects to the others"
        await workforce.tell_gateway()
        began = time.monotonic()
        await workforce.serve(driver, workforce.setup.config.server.grpc_port)
        self._say(f"driver: serving after {time.monotonic() - began:.1f} s")
        await driver.handle.note_lives.remote(workforce.lives())

    async def progress(self, seen: int) -> list[str]:
        self._heard_at = time.monotonic()
        return self._lines[seen:]

    async def pid(self) -> int:
        return os.getpid()

    async def address(self, for_gateways: bool = False) -> str | None:
        """Address of InferenceService; None: it does not serve yet.

        `for_gateways`: that for gateways of this deployment, which may be another one.
        """
        await self._adopted.wait()
        driver = self._workforce.driver
        serving = None if driver is None else driver.serving
        if serving is not None and for_gateways:
            return serving.inner_address or serving.address
        return None if serving is None else serving.address

    async def http_address(self) -> str | None:
        await self._adopted.wait()
        gateway = self._workforce.gateway
        return None if gateway is None else gateway.address

    async def starter_silent_for(self) -> float | None:
        """Seconds since the starter asked last; None: it need not ask, since all is up."""
        is_up = self._workforce.phase == "runs"
        return None if is_up else time.monotonic() - self._heard_at

    async def workers(self) -> list[WorkerStatus]:
        await self._adopted.wait()
        workforce = self._workforce
        uses: dict[str, Sequence[ShareUse]] = {}
        if workforce.driver is None:
            asked = [one for one in workforce.workers if one.handle is not None]
            answers = await asyncio.gather(*map(_uses_of, asked))
            uses = {one.name: answer for one, answer in zip(asked, answers, strict=True)}
        return [
            WorkerStatus(
                name=worker.name,
                kind=worker.kind,
                address=worker.address,
                pid=None if worker.serving is None else worker.serving.pid,
                restarts=worker.restarts,
                uses=uses.get(worker.name, ()),
            )
            for worker in workforce.all
        ]

    async def lives(self) -> list[WorkerLife]:
        await self._adopted.wait()
        return self._workforce.lives()

    async def apply(self, config: Config) -> list[str]:
        """Change the deployment to this configuration while it serves. Returns what was done.

        What joins serves before anything leaves, if there is room for both. Raises ConfigError if a
        key may not change, UnavailableError if there is no room, or what the workers that join
        raise. Then nothing has changed, except that drafters which had to make room have ended.
        """
        await self._adopted.wait()
        if self._workforce.phase != "runs" or _CHANGE in self._watches:
            raise UnavailableError(
                "the deployment is starting, changing or ending; try again later"
            )
        changing = asyncio.create_task(self._change(config))
        self._watches[_CHANGE] = changing
        try:
            return await changing
        except asyncio.CancelledError:
            raise UnavailableError("the deployment ended before it was changed") from None
        finally:
            self._watches.pop(_CHANGE, None)

    async def _change(self, config: Config) -> list[str]:
        workforce = self._workforce
        if unfinished := [one for one in workforce.workers if not one.in_use]:
            await self._dismiss(unfinished)  # An earlier change failed before it came to this.
        change = plan_change(
            workforce.setup.config, config, [one.plan for one in workforce.workers if one.plan]
        )
        leaving = [one for one in workforce.workers if one.name in change.leaving]
        drafters = [one for one in leaving if one.is_drafter]
        said = []
        joining = await workforce.enlist_groups(change.joining_groups)
        try:
            for shard in joining:
                workforce.make(shard)
            await asyncio.gather(*map(self._serve_in_time, joining))
            for plan in change.joining:
                drafter = await workforce.enlist(plan)
                if drafter is None and drafters:
                    said += await self._dismiss(drafters)
                    leaving = [one for one in leaving if one not in drafters]
                    drafters = []
                    drafter = await workforce.enlist(plan)
                if drafter is None:
                    raise UnavailableError(
                        f"the cluster has no room for {plan.name}, which needs {bundle_of(plan)}; "
                        "free some, or add fewer drafters"
                    )
                joining.append(drafter)
                workforce.make(drafter)
                await self._serve_in_time(drafter)
                said.append(f"{plan.name} joins: {plan.model or plan.kind}")
        except BaseException:
            for worker in joining:
                workforce.dismiss(worker)
            workforce.save()
            await Revival(workforce).tell_all()
            raise
        before = workforce.setup
        for worker in joining:
            worker.in_use = True
        for worker in leaving:
            worker.in_use = False
        workforce.setup = replace(before, config=config)
        workforce.save()
        self._watch(joining)
        if change.joining_groups:
            await Revival(workforce).tell_all()
            if trouble := await self._not_scaled(change.joining_groups, _CONNECT_SECONDS):
                for worker in leaving:
                    worker.in_use = True
                workforce.setup = before
                await self._dismiss(joining)
                raise UnavailableError(f"the driver cannot use the new target groups: {trouble}")
            said += [f"target group {one} joins" for one in change.joining_groups]
        said += await self._dismiss(leaving)
        return [*said, *change.keys]

    async def _serve_in_time(self, worker: Worker) -> None:
        """Have a worker serve. Raises UnavailableError after _JOIN_SECONDS, or what it raises."""
        try:
            async with asyncio.timeout(_JOIN_SECONDS):
                await self._workforce.serve(worker, 0)
        except TimeoutError:
            raise UnavailableError(
                f"{worker.name} did not serve within {_JOIN_SECONDS:g} s"
            ) from None

    async def _dismiss(self, leaving: Sequence[Worker]) -> list[str]:
        """Have workers leave. Their sequences continue with others, or without a drafter.

        Returns what was done. A target group first ends or hands on its sequences.
        """
        workforce = self._workforce
        if watched := [one.name for one in leaving if one.name in self._watches]:
            await self._end_watches(*watched)
        for worker in leaving:
            worker.in_use = False
        workforce.save()
        await Revival(workforce).tell_all()
        plans = [one.plan for one in leaving if one.plan]
        groups = sorted({plan.target_group for plan in plans if plan.drafter is None})
        if groups and (trouble := await self._not_scaled(groups, _RETIRE_SECONDS)):
            _log.warning("workers leave, although %s", trouble)
        for worker in leaving:
            workforce.dismiss(worker)
            workforce.states.pop(worker.name, None)
        workforce.save()
        return [
            *(f"target group {one} leaves" for one in groups),
            *(f"{one.name} leaves: {one.model or one.kind}" for one in plans if one.drafter),
        ]

    async def _not_scaled(self, groups: Sequence[int], seconds: float) -> str | None:
        """Which of these groups has not joined or left in `seconds`, and why; None: all have."""
        driver = self._workforce.driver
        assert driver is not None
        try:
            trouble: str | None = await outcome_of(
                driver.handle.until_scaled.remote(groups, seconds), DRIVER
            )
        except (WorkerLostError, UnavailableError):
            return None  # The next driver begins with the groups that there are.
        return trouble

    async def _finish_change(self, leaving: Sequence[Worker]) -> None:
        """After a controller ended half-way: have workers leave that joined, or left already."""
        try:
            await self._dismiss(leaving)
        except Exception:
            _log.exception("workers could not leave; they will at the next change")
        finally:
            self._watches.pop(_CHANGE, None)

    async def stop(self, drain_seconds: float = 0.0) -> int:
        """End all workers and free what they reserved. The caller then ends this actor.

        First take no more requests, and give running ones `drain_seconds` to end. Returns how many
        did not end in time.
        """
        await self._adopted.wait()
        workforce, left, grace = self._workforce, 0, None
        driver, gateway = workforce.driver, workforce.gateway
        if driver is not None and driver.serving is not None and drain_seconds > 0:
            with contextlib.suppress(RayError, TimeoutError):
                async with asyncio.timeout(drain_seconds + _STOP_SECONDS):
                    if gateway is not None and gateway.serving is not None:
                        gateway.handle.drain.remote(drain_seconds)
                    left = await driver.handle.drain.remote(drain_seconds)
            grace = _LAST_WORD_SECONDS
        await self._end_watches()
        workforce.phase = "ends"
        workforce.save()
        for worker in (gateway, driver):
            if worker is not None and worker.serving is not None and worker.handle is not None:
                with contextlib.suppress(RayError, TimeoutError):
                    await asyncio.wait_for(worker.handle.stop.remote(grace), _STOP_SECONDS)
        workforce.release()
        self._tasks.append(asyncio.create_task(self._leave(_LEAVE_SECONDS)))
        return left

    def _watch(self, workers: Sequence[Worker], lost: Sequence[Worker] = ()) -> None:
        """Begin to watch workers, of which some are `lost` already.

        These come first: each has a new actor before another watch asks it.
        """
        revival = Revival(self._workforce)
        for worker in sorted(workers, key=lambda one: one not in lost):
            watch = revival.watch(worker, is_lost=worker in lost)
            self._watches[worker.name] = asyncio.create_task(watch)

    async def _begin(self) -> None:
        """Take over what an earlier process had. Ray starts this one again if that fails."""
        try:
            ledger = await asyncio.to_thread(read_ledger, self._deployment)
            if ledger is None:  # This is the first process, or the first one made nothing.
                self._adopted.set()
            else:
                await self._adopt(ledger)
        except Exception:
            _log.exception("the controller cannot take over; its process starts again")
            await asyncio.sleep(_ANOTHER_TRY_SECONDS)
            os._exit(1)

    async def _adopt(self, ledger: Ledger) -> None:
        if ledger.phase != "runs":
            _log.warning("an earlier process of the controller did not get further; all ends")
            await self._leave()
            return
        try:
            workforce = await asyncio.to_thread(
                Workforce.found, ledger, deployment=self._deployment, groups=self._groups
            )
        except ValueError as error:
            _log.warning("the owner has ended (%s): all ends", error)
            await self._leave()
            return
        await workforce.restore_places()
        self._workforce = workforce
        lost = [
            one
            for one in workforce.all
            # A drafter that does not serve yet was joining when the controller ended.
            if one.in_use and (one.handle is None or one.restarting or one.serving is None)
        ]
        alive = [one.name for one in workforce.all if one not in lost]
        _log.warning("the controller is back, and takes over %s", ", ".join(alive))
        self._watch([one for one in workforce.all if one.in_use], lost)
        if leaving := [one for one in workforce.all if not one.in_use]:
            self._watches[_CHANGE] = asyncio.create_task(self._finish_change(leaving))
        self._adopted.set()
        if workforce.driver not in lost:
            await Revival(workforce).tell_all()

    async def _until_left(self) -> None:
        """End everything when the owner has ended, or the starter before all is up."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if not self._adopted.is_set():
                continue  # It is not known yet what there is.
            workforce = self._workforce
            silent = time.monotonic() - self._heard_at
            try:
                if workforce.phase == "starts" and silent > STARTER_SECONDS:
                    _log.warning("the starter has not asked for %.0f s: all ends", silent)
                    await self._leave()
                elif await asyncio.to_thread(workforce.is_disowned):
                    _log.warning("the owner has ended: all ends")
                    await self._leave()
            except Exception:  # Ray's GCS may be away for a while.
                _log.exception("the controller could not look whether it is needed")

    async def _leave(self, seconds: float = 0.0) -> None:
        """End all workers and, after `seconds`, this actor for good."""
        await self._end_watches()
        self._workforce.release()
        await asyncio.sleep(seconds)
        ray.kill(ray.get_runtime_context().current_actor)

    async def _end_watches(self, *names: str) -> None:
        """End the watches of these workers; without names, everything that works on workers."""
        watches = [self._watches.pop(name) for name in names or tuple(self._watches)]
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)

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


async def _uses_of(drafter: Worker) -> Sequence[ShareUse]:
    """What each party uses of a drafter; nothing if it does not answer."""
    try:
        async with asyncio.timeout(_STOP_SECONDS):
            found: Sequence[ShareUse] = await drafter.handle.uses.remote()
            return found
    except (RayError, TimeoutError):
        return ()

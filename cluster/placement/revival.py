"""Starts lost workers again, in the same place or, if that is lost, on another node.

The more often a worker was lost recently, the longer the pause before the next try. A worker that
is repeatedly lost in one place gets another place. A drafter or shard gets a new address, which the
driver is told. The driver returns at the port that callers know. Of a target's shards only lost
ones are started again; the driver then brings the group together anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from functools import partial

from ray.exceptions import RayError

from cluster.placement.actor_calls import answer_of, outcome_of
from cluster.placement.lives import LONGEST_PAUSE, until_lost, until_started
from cluster.placement.workforce import DRIVER, Worker, Workforce
from paceline.errors import PacelineError, WorkerLostError

_START_SECONDS = 60.0
"""Time for a process to start at the first try. It doubles with each further try, because a process
that starts slowly is slower still when it is started over."""
_ANSWER_SECONDS = 5.0
_LOOK_SECONDS = 0.2
_log = logging.getLogger(__name__)


class Revival:
    """Watches workers that serve, and starts them again when they are lost."""

    def __init__(self, workforce: Workforce) -> None:
        self._workforce = workforce
        self._driver = workforce.driver
        self._hung_after = workforce.setup.config.target.hung_after

    async def watch(self, worker: Worker, *, is_lost: bool = False) -> None:
        """Start the worker again whenever it is lost, until cancelled. `is_lost`: it is already."""
        while True:
            try:
                if is_lost:
                    await self._revive(worker, "its process ended while the controller was away")
                    is_lost = False
                await self._watch_once(worker)
            except Exception:  # Go on: no other task watches the worker.
                _log.exception("a defect ended the watch of %s; it starts again", worker.name)
                await asyncio.sleep(LONGEST_PAUSE)

    async def _watch_once(self, worker: Worker) -> None:
        why = await until_lost(
            worker.handle,
            hung_after=self._hung_after,
            is_heard=partial(self._is_heard, worker),
            why_useless=None if worker.plan is None else partial(self._why_useless, worker),
        )
        _log.warning("%s is lost (%s)", worker.name, why)
        await self._revive(worker, why)

    async def _why_useless(self, worker: Worker) -> str | None:
        """Why the driver cannot work with an answering worker; None: it can, or it is unknown."""
        if self._driver is None:
            return None
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                failing = await self._driver.handle.failing.remote(self._hung_after)
        except (RayError, TimeoutError):
            return None
        why: str | None = failing.get(worker.name)
        return why

    async def _is_heard(self, worker: Worker) -> bool:
        """Whether the driver has open streams to the worker and no answer is overdue."""
        if worker.plan is None or self._driver is None:
            return False
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                return worker.name in await self._driver.handle.connected.remote()
        except (RayError, TimeoutError):
            return False

    async def _revive(self, worker: Worker, why: str) -> None:
        port, told = worker.port, worker.told_address
        patience = _START_SECONDS
        trouble = f"{worker.name} is lost ({why}) and is started again"
        worker.restarting = True
        self._workforce.states[worker.name] = "is lost and is started again"
        while True:
            worker.end_of_process(why)
            await self._pause(worker, trouble)
            self._workforce.make(worker)
            try:
                await self._tell(worker, trouble)
                starting = until_started(
                    worker.handle,
                    worker.name,
                    *self._workforce.room_of(worker),
                    seconds=patience,
                    tell=partial(self._tell_trouble, worker),
                )
                await outcome_of(starting, worker.name)
                if worker is self._driver:
                    await self._until_shards_serve()
                await self._workforce.serve(worker, port if worker.plan is None else 0)
                worker.restarting = False
                if worker.told_address != told or worker is self._driver:
                    await self._tell_driver(worker)
            except PacelineError as error:
                _log.warning("%s: cannot be started again yet: %s", worker.name, error)
                trouble = why = str(error)
                patience = 2 * patience
                worker.restarting = True
                continue
            worker.restarts += 1
            self._workforce.save()
            self._workforce.states.pop(worker.name, None)
            await self._workforce.tell_gateway(drivers=True)
            await self._tell_lives()
            _log.warning("%s: serving again at %s", worker.name, worker.address)
            return

    async def _pause(self, worker: Worker, trouble: str) -> None:
        """Wait before the next try. Look for another place if this one was tried often enough."""
        pause = worker.ends.pause
        if pause == 0:
            return
        self._workforce.end(worker)
        worker.next_try_at = time.monotonic() + pause
        _log.warning("%s: next try in %g s", worker.name, pause)
        await self._tell(worker, f"{trouble}; next try in {pause:g} s")
        if worker.ends.wants_another_place and await self._workforce.try_elsewhere(worker):
            _log.warning("%s: moves to another place", worker.name)
        await asyncio.sleep(worker.next_try_at - time.monotonic())
        worker.next_try_at = None

    async def tell_all(self) -> None:
        """Tell driver and gateway all that they should know: after a change, or an absence."""
        if self._driver is not None:
            with contextlib.suppress(PacelineError):
                await self._tell_driver(self._driver)
        await self._tell_lives()
        await self._workforce.tell_gateway(drivers=True)

    async def _tell_driver(self, revived: Worker) -> None:
        """Tell the driver where the worker is now, possibly on another host.

        A driver that is lost itself is told when it is started again, because other workers may
        have moved while it started.
        """
        if self._driver is None:
            return
        driver, calls = self._driver.handle, []
        if revived.is_shard or revived is self._driver:
            calls.append(partial(driver.set_target.remote, self._workforce.target_addresses()))
        if revived.is_drafter or revived is self._driver:
            calls.append(partial(driver.set_drafters.remote, self._workforce.drafter_addresses()))
        if revived is self._driver:
            calls.append(partial(driver.set_defaults.remote, self._workforce.setup))
        with contextlib.suppress(WorkerLostError):
            for call in calls:
                await outcome_of(answer_of(call), DRIVER)

    async def _tell(self, worker: Worker, trouble: str) -> None:
        await asyncio.gather(
            self._tell_trouble(worker, trouble),
            self._tell_lives(),
            self._workforce.tell_gateway(),
        )

    async def _tell_trouble(self, worker: Worker, trouble: str) -> None:
        """Tell a living driver why a shard stays away. Requests that fail report it."""
        if worker.is_shard and self._driver is not None:
            with contextlib.suppress(PacelineError, TimeoutError):
                async with asyncio.timeout(_ANSWER_SECONDS):
                    await outcome_of(self._driver.handle.note_target.remote(trouble), DRIVER)

    async def _tell_lives(self) -> None:
        if self._driver is None:
            return
        with contextlib.suppress(PacelineError, TimeoutError):
            async with asyncio.timeout(_ANSWER_SECONDS):
                lives = self._workforce.lives()
                await outcome_of(self._driver.handle.note_lives.remote(lives), DRIVER)

    async def _until_shards_serve(self) -> None:
        """Wait for shards that are lost as well, else a driver would use old addresses."""
        while not all(await asyncio.gather(*map(self._serves, self._workforce.shards))):
            await asyncio.sleep(_LOOK_SECONDS)

    async def _serves(self, shard: Worker) -> bool:
        if shard.restarting:
            return False
        try:  # It may have been lost with the driver, without its own watch knowing yet.
            async with asyncio.timeout(_ANSWER_SECONDS):
                await shard.handle.ping.remote()
        except (RayError, TimeoutError):
            return False
        return not shard.restarting

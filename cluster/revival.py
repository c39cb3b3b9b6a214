"""Starting a worker again that was lost: in its place, or on another node where its own is lost.

A drafter gets a new address, which the driver is told; a shard and the driver come back at the port
that they had. Of a target's shards only those that were lost are started again: the driver brings
the group together anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial

from ray.exceptions import RayError

from cluster.actor_calls import answer_of, outcome_of
from cluster.lives import until_lost, until_started
from cluster.workforce import DRIVER, Worker, Workforce
from paceline.errors import PacelineError, WorkerLostError

_START_SECONDS = 60.0
"""How long a process may take to be there, at the first try; twice as long at each further one, for
one that is slow to come is slower still when it is begun anew."""
_LONGEST_WAIT = 30.0
_ANSWER_SECONDS = 5.0
_LOOK_SECONDS = 0.2
_log = logging.getLogger(__name__)


class Revival:
    """Watches workers that serve, and starts them again."""

    def __init__(self, workforce: Workforce) -> None:
        self._workforce = workforce
        self._driver = workforce.driver
        self._hung_after = workforce.setup.config.target.hung_after

    async def watch(self, worker: Worker) -> None:
        """Start the worker again whenever it is lost, until cancelled."""
        while True:
            why = await until_lost(
                worker.handle,
                hung_after=self._hung_after,
                is_heard=partial(self._is_heard, worker),
            )
            _log.warning("%s is lost (%s); starting it again", worker.name, why)
            await self._revive(worker, why)

    async def _is_heard(self, worker: Worker) -> bool:
        """Whether the driver has open streams to the worker and no answer is overdue."""
        if worker is self._driver:
            return False
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                return worker.name in await self._driver.handle.connected.remote()
        except (RayError, TimeoutError):
            return False

    async def _revive(self, worker: Worker, why: str) -> None:
        wait, patience = 0.5, _START_SECONDS
        port, address = worker.port, worker.address
        trouble = f"{worker.name} is lost ({why}) and is started again"
        while True:
            worker.restarting = True
            self._workforce.make(worker)
            try:
                await self._tell_trouble(worker, trouble)
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
                await self._workforce.serve(worker, 0 if worker.is_drafter else port)
                worker.restarting = False
                if worker.address != address or worker is self._driver:
                    await self._tell_driver(worker)
            except PacelineError as error:
                _log.warning("%s: cannot be started again yet: %s", worker.name, error)
                trouble = str(error)
                await self._tell_trouble(worker, trouble)
                await asyncio.sleep(wait)
                wait, patience = min(2 * wait, _LONGEST_WAIT), 2 * patience
                continue
            worker.restarts += 1
            _log.warning("%s: serving again", worker.name)
            return

    async def _tell_driver(self, revived: Worker) -> None:
        """Tell where the worker is now: on another host perhaps, where its own is lost.

        A driver that is lost as well is told when it is started again; others may have moved while
        it started.
        """
        driver, calls = self._driver.handle, []
        if not revived.is_drafter:
            calls.append(partial(driver.set_target.remote, self._workforce.target_addresses()))
        if not revived.is_shard:
            calls.append(partial(driver.set_drafters.remote, self._workforce.drafter_addresses()))
        with contextlib.suppress(WorkerLostError):
            for call in calls:
                await outcome_of(answer_of(call), DRIVER)

    async def _tell_trouble(self, worker: Worker, trouble: str) -> None:
        """Tell the driver, where it lives, why a shard stays away: requests that fail say so."""
        if worker.is_shard:
            with contextlib.suppress(PacelineError, TimeoutError):
                async with asyncio.timeout(_ANSWER_SECONDS):
                    await outcome_of(self._driver.handle.note_target.remote(trouble), DRIVER)

    async def _until_shards_serve(self) -> None:
        """Wait for those that are lost as well: a driver would look at old addresses."""
        while not all(await asyncio.gather(*map(self._serves, self._workforce.shards))):
            await asyncio.sleep(_LOOK_SECONDS)

    async def _serves(self, shard: Worker) -> bool:
        if shard.restarting:
            return False
        try:  # It may have been lost with the driver, and its own watch be slower to hear of it.
            async with asyncio.timeout(_ANSWER_SECONDS):
                await shard.handle.ping.remote()
        except (RayError, TimeoutError):
            return False
        return not shard.restarting

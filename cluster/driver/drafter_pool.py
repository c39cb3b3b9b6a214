"""The links to all drafters, by name. Drafters may come, go and move while requests run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial

from cluster.driver.drafter_link import DrafterLink, DrafterListener, TargetVocabulary
from cluster.driver.meters import WorkerMeter
from cluster.driver.worker_wire import DraftInstruction
from paceline.errors import VocabularyMismatchError

_AGAIN_SECONDS = 1.0
_log = logging.getLogger(__name__)


class DrafterPool:
    """One link a drafter. `probe_timeout`: seconds after which a silent drafter counts as hung."""

    def __init__(
        self, listener: DrafterListener, target: TargetVocabulary, *, probe_timeout: float
    ) -> None:
        self._listener = listener
        self._target = target
        self._probe_timeout = probe_timeout
        self._meters: dict[str, WorkerMeter] = {}
        self._links: dict[str, DrafterLink] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def meters(self) -> list[WorkerMeter]:
        """The meters of the drafters in the pool. Removed drafters are not included."""
        return [self._meters[name] for name in self._links]

    @property
    def rules_by_kind(self) -> Mapping[str, frozenset[str]] | None:
        """The kinds of these drafters, and the rules that those of a kind can draft for.

        None while a drafter has not described itself yet.
        """
        if any(meter.joins == 0 for meter in self.meters):
            return None
        found: dict[str, frozenset[str]] = {}
        for meter in self.meters:
            found[meter.kind] = found.get(meter.kind, frozenset()) | meter.rules
        return found

    async def start(self, addresses: Mapping[str, str], seconds: float) -> None:
        """Connect, and wait at most `seconds` until each was tried once.

        Raises VocabularyMismatchError. A drafter that cannot be reached is no error.
        """
        await self.update(addresses)
        tries = [link.first_try for link in self._links.values()]
        if tries:
            await asyncio.wait(tries, timeout=seconds)
        for first_try in tries:
            error = first_try.exception() if first_try.done() else None
            if isinstance(error, VocabularyMismatchError):
                raise error

    async def update(self, addresses: Mapping[str, str]) -> None:
        """Have exactly these drafters. A link whose address stays is kept."""
        for name in list(self._links):
            if self._meters[name].address != addresses.get(name):
                await self._drop(name)
        for name, address in addresses.items():
            if name not in self._links:
                self._add(name, address)

    async def stop(self) -> None:
        """End all links."""
        for name in list(self._links):
            await self._drop(name)

    def send(self, name: str, instructions: Sequence[DraftInstruction]) -> None:
        """Send instructions, at least one, to the drafter that they name."""
        link = self._links.get(name)
        if link is not None:
            link.send(instructions)

    def suspect(self, name: str, reason: str) -> None:
        """Do not use a drafter until it has another process."""
        link = self._links.get(name)
        if link is not None:
            link.suspect(reason)

    def _add(self, name: str, address: str) -> None:
        meter = self._meters.setdefault(name, WorkerMeter(name, "drafter", address))
        meter.address = address
        meter.suspect = False
        link = DrafterLink(meter, self._listener, self._target, probe_timeout=self._probe_timeout)
        self._links[name] = link
        self._run(name, link)

    def _run(self, name: str, link: DrafterLink) -> None:
        task = self._tasks[name] = asyncio.create_task(link.run())
        task.add_done_callback(partial(self._run_again, name, link))

    def _run_again(self, name: str, link: DrafterLink, task: asyncio.Task[None]) -> None:
        """Restart a link that ended by a defect, after a pause. Others run until dropped."""
        if task.cancelled() or self._tasks.get(name) is not task:
            return
        _log.error("the link to %s ended; it is started again", name, exc_info=task.exception())
        asyncio.get_running_loop().call_later(_AGAIN_SECONDS, self._begin_anew, name, link, task)

    def _begin_anew(self, name: str, link: DrafterLink, ended: asyncio.Task[None]) -> None:
        if self._tasks.get(name) is ended:
            self._run(name, link)

    async def _drop(self, name: str) -> None:
        task = self._tasks.pop(name)
        link = self._links[name]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        link.first_try.cancel()
        del self._links[name]

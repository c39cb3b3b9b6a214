"""The links to all drafters, by name. Drafters may come, go and move while requests run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from cluster.connections import start_heard
from cluster.drafter_link import DrafterLink, DrafterListener, TargetVocabulary
from cluster.meters import WorkerMeter
from cluster.worker_wire import DraftInstruction
from paceline.errors import VocabularyMismatchError


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
        """Of the drafters in the pool; those that were taken out are forgotten."""
        return [self._meters[name] for name in self._links]

    @property
    def kinds(self) -> frozenset[str] | None:
        """The kinds of these drafters; None while one has not said yet what it is."""
        if any(meter.joins == 0 for meter in self.meters):
            return None
        return frozenset(meter.kind for meter in self.meters)

    async def start(self, addresses: Mapping[str, str], seconds: float) -> None:
        """Connect, and wait until each was tried once, at most `seconds`.

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
        """Have exactly these drafters; a link whose address stays is kept as it is."""
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

    def suspect(self, name: str) -> None:
        """Use a drafter no more until its process is another one."""
        link = self._links.get(name)
        if link is not None:
            link.suspect()

    def _add(self, name: str, address: str) -> None:
        meter = self._meters.setdefault(name, WorkerMeter(name, "drafter", address))
        meter.address = address
        meter.suspect = False
        link = DrafterLink(meter, self._listener, self._target, probe_timeout=self._probe_timeout)
        self._links[name] = link
        self._tasks[name] = start_heard(link.run(), self._listener.break_down)

    async def _drop(self, name: str) -> None:
        task = self._tasks.pop(name)
        link = self._links[name]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        link.first_try.cancel()
        del self._links[name]

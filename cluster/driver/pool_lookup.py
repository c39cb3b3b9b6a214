"""Drafters of a pool: started by somebody else, shared with other drivers.

They are found by address, or in Ray as those of another deployment. A name that resolves to several
addresses, such as a headless Service of Kubernetes, means as many drafters. All is looked up again
and again, so the pool may grow, shrink and move.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cluster.driver.connections import one_line

LOOK_SECONDS = 2.0
"""Seconds between two look-ups of the names."""
MAX_DRAFTERS = 64
"""Most addresses of a name that are used."""
ABSENT_SECONDS = 30.0
"""An address that a name no longer resolves to is used for so long: a name server may answer with
some of the addresses at a time."""
_LOOK_UP_SECONDS = 5.0
_IN_RAY = "deployment"

FindDrafters = Callable[[], Mapping[str, str]]
"""Looks up the drafters of a deployment: addresses by name. It may block, and raise anything."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Nearness:
    """How far drafters are from a driver with these `labels`. `keys`: labels, the finest first."""

    keys: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)

    def distance_to(self, labels: Mapping[str, str]) -> int:
        """0 with the same value of the first key, 1 of the second, and so on."""
        for distance, key in enumerate(self.keys):
            if key in self.labels and labels.get(key) == self.labels[key]:
                return distance
        return len(self.keys)


ANYWHERE = Nearness()


class SharedDrafters:
    """The drafters of a pool, by name. `addresses`: each "host:port". `find`: finds more."""

    def __init__(self, addresses: Sequence[str], find: FindDrafters | None = None) -> None:
        self._find = find
        self._of_deployment: Mapping[str, str] = {}
        self._looking: asyncio.Task[Mapping[str, str]] | None = None
        self._found: dict[str, list[str]] = {address: [] for address in addresses}
        self._seen: dict[str, dict[str, float]] = {address: {} for address in addresses}
        self._troubles: dict[str, str] = {}

    @property
    def addresses(self) -> Mapping[str, str]:
        """The addresses that were found at the last look, by the names of the drafters."""
        every = dict.fromkeys(one for found in self._found.values() for one in found)
        return {**self._of_deployment, **{f"pool-{one}": one for one in every}}

    async def look(self) -> None:
        """Look all names up. What a name resolved to stays in use while it cannot be looked up."""
        await asyncio.gather(self._look_in_ray(), *map(self._look_up, self._found))

    async def follow(self, changed: Callable[[], Awaitable[None]]) -> None:
        """Look again and again, and call `changed` after each change, until cancelled."""
        told = self.addresses
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.look()
                if (found := self.addresses) != told:
                    await changed()
                    told = found
            except Exception:  # Nothing else follows the pool.
                _log.exception("a defect kept the pool of drafters from being followed")

    async def _look_in_ray(self) -> None:
        if self._find is None:
            return
        if self._looking is None:  # One thread at most, which waits while Ray's GCS is away.
            self._looking = asyncio.create_task(asyncio.to_thread(self._find))
        done, _ = await asyncio.wait({self._looking}, timeout=_LOOK_UP_SECONDS)
        if not done:
            self._tell(_IN_RAY, "Ray does not answer")
            return
        looked, self._looking = self._looking, None
        if (error := looked.exception()) is not None:
            self._tell(_IN_RAY, str(error) or type(error).__name__)
            return
        self._of_deployment = looked.result()
        self._tell(_IN_RAY, "" if self._of_deployment else "it has no drafters, or is not there")

    async def _look_up(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_LOOK_UP_SECONDS):
                infos = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except (OSError, TimeoutError, UnicodeError) as error:
            self._tell(f"address {address}", str(error) or one_line(error))
            return
        self._tell(f"address {address}", "")
        # A host with addresses of both kinds is one drafter, not two.
        own = [one for one in infos if one[0] == socket.AF_INET] or infos
        now, seen = loop.time(), self._seen[address]
        seen |= {_written(str(one[4][0]), int(one[4][1])): now for one in own}
        for one in [one for one, at in seen.items() if now - at >= ABSENT_SECONDS]:
            del seen[one]
        used = [one for one in self._found[address] if one in seen]
        self._found[address] = [*used, *sorted(seen.keys() - set(used))][:MAX_DRAFTERS]

    def _tell(self, where: str, trouble: str) -> None:
        """Log what is new: why a place cannot be looked up, or ("") that it can be again."""
        before = self._troubles.pop(where, "")
        if trouble:
            self._troubles[where] = trouble
        if trouble and trouble != before:
            _log.warning("the pool's %s cannot be looked up: %s", where, trouble)
        elif before and not trouble:
            _log.warning("the pool's %s can be looked up again", where)


def _written(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

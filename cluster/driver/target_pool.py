"""The links to all groups of the target. Groups may come and go while requests run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from cluster.decoding.instructions import RunStep
from cluster.driver.connections import start_heard
from cluster.driver.meters import WorkerMeter
from cluster.driver.target_link import StepTimeout, TargetLink, TargetListener
from paceline.errors import UnavailableError


class TargetPool:
    """One link for each group. All groups have the same number of shards.

    `addresses`: of all shards, group by group, each by rank.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        listener: TargetListener,
        *,
        num_groups: int,
        vocabulary_digest: bytes,
        step_timeout: StepTimeout,
    ) -> None:
        if len(addresses) % num_groups:
            raise ValueError(f"{len(addresses)} shards are not {num_groups} groups alike")
        self._degree = len(addresses) // num_groups
        self._links = [
            TargetLink(
                part,
                listener,
                group=group,
                num_groups=num_groups,
                vocabulary_digest=vocabulary_digest,
                step_timeout=step_timeout,
            )
            for group, part in enumerate(self._by_group(addresses))
        ]
        self._tasks = [start_heard(link.run(), listener.break_down) for link in self._links]

    @property
    def meters(self) -> list[WorkerMeter]:
        """The meters of all shards, group by group."""
        return [meter for link in self._links for meter in link.meters]

    async def start(self, seconds: float, joined: asyncio.Event) -> None:
        """Wait at most `seconds` until every group has joined, which sets `joined`.

        Raises UnavailableError, VocabularyMismatchError, or CheckpointError.
        """
        waiting = asyncio.create_task(joined.wait())
        refused = [link.refused for link in self._links]
        either: list[asyncio.Future[Any]] = [waiting, *refused]
        try:
            await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        for one in refused:
            if one.done():
                one.result()
        for link in self._links:
            if not link.meters[0].joins:
                raise UnavailableError(
                    f"the target at {', '.join(meter.address for meter in link.meters)} could not "
                    f"be reached within {seconds:g} s: {link.last_error}; check that every shard "
                    "is up"
                )

    async def stop(self) -> None:
        """End all links."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def send(self, step: RunStep) -> None:
        """Send a step to its group, which must have joined."""
        self._links[step.group].send(step)

    def move(self, addresses: Sequence[str]) -> None:
        """Look for the shards at these addresses from the next connection on."""
        for link, part in zip(self._links, self._by_group(addresses), strict=True):
            link.move(part)

    def _by_group(self, addresses: Sequence[str]) -> list[Sequence[str]]:
        degree = self._degree
        return [addresses[first : first + degree] for first in range(0, len(addresses), degree)]

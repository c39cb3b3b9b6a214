"""Several ranks in one process, each with a thread and a group of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from workers.engine.parallel.group import Deadlines, RankGroup
from workers.engine.parallel.weight_cuts import Place

Result = TypeVar("Result")
PATIENT = Deadlines(meeting=120.0, collective=120.0)
"""No rank stays away. Only a busy host makes them wait for each other."""


class Ranks:
    """`degree` groups that may meet. Use as a context manager."""

    def __init__(
        self,
        degree: int,
        *,
        deadlines: Deadlines = PATIENT,
        device_of: Callable[[int], str] = lambda rank: "cpu",
        device_names: Sequence[str] | None = None,
        interface: str | None = None,
    ) -> None:
        """`device_of`: a rank's device in torch. `device_names`: distinguish the devices."""
        self.groups = [
            RankGroup(
                Place(rank, degree),
                host="127.0.0.1",
                interface=interface,
                device=device_of(rank),
                device_name=None if device_names is None else device_names[rank],
                deadlines=deadlines,
            )
            for rank in range(degree)
        ]
        self._threads = ThreadPoolExecutor(degree, initializer=torch.set_num_threads, initargs=(1,))

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for group in self.groups:
            group.close()
        self._threads.shutdown()

    def meet(self, name: str = "once") -> None:
        """All ranks meet."""
        self.together(lambda group: self.join(group, name))

    def join(self, group: RankGroup, name: str = "once") -> None:
        """One rank goes to the meeting."""
        rendezvous = self.groups[0].rendezvous
        assert rendezvous is not None
        group.meet(name, rendezvous)

    def together(self, work: Callable[[RankGroup], Result]) -> list[Result]:
        """Run `work` on every rank at once. Returns results by rank; raises the first error."""
        futures = [self._threads.submit(work, group) for group in self.groups]
        return [future.result(timeout=240) for future in futures]

    def errors(self, work: Callable[[RankGroup], Any]) -> list[BaseException | None]:
        """The error of each rank's `work`."""
        futures = [self._threads.submit(work, group) for group in self.groups]
        return [future.exception(timeout=240) for future in futures]

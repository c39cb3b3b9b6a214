"""Messages that come late: a host that has other things to do, and a network that others use."""

from __future__ import annotations

import random
from dataclasses import dataclass

_LEAST_STALL_MS, _MOST_STALL_MS = 20.0, 100.0


@dataclass(frozen=True, slots=True)
class Unrest:
    """Each message comes later by `jitter_ms` on average, exponentially distributed.

    One in `stalls_one_in`, where that is not 0, comes 20 to 100 ms later still, and what follows it
    on its link no sooner. The same seed gives the same delays.
    """

    jitter_ms: float = 0.0
    stalls_one_in: int = 0
    seed: int = 0

    def source(self, number: int) -> Lateness:
        """Of one link of so many."""
        return Lateness(self, random.Random(f"{self.seed} {number}"))


class Lateness:
    """How much later the next message of a link comes."""

    def __init__(self, unrest: Unrest, source: random.Random) -> None:
        self._unrest = unrest
        self._source = source

    def next_seconds(self) -> float:
        """Drawn anew for each."""
        unrest, source = self._unrest, self._source
        ms = source.expovariate(1 / unrest.jitter_ms) if unrest.jitter_ms else 0.0
        if unrest.stalls_one_in and source.randrange(unrest.stalls_one_in) == 0:
            ms += source.uniform(_LEAST_STALL_MS, _MOST_STALL_MS)
        return ms / 1000

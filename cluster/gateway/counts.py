"""Counts of several gateways behind one address, such as replicas on Ray Serve, as those of one.

A scrape reaches any of them. So each tells a holder, which they all reach, what it has counted, and
answers a scrape with the sum. Counts of a gateway that has ended stay in the sum, so that no
counter goes back when it is replaced.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from secrets import token_hex
from typing import Self

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

TELL_SECONDS = 2.0
"""Time between two messages of a gateway: what it may lose of its counts if it is killed."""

SILENT_SECONDS = 10.0
"""A gateway that has told nothing for this long counts as ended: its gauges are dropped."""

MAX_ENDED = 16
"""Most gateways that have ended of which counts are kept apart. Beyond that, two become one."""

_ANSWER_SECONDS = 2.0
"""How long the holder may take to answer."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Counted:
    """What one gateway has counted. `number`: the highest of a gateway is its latest."""

    number: int
    families: tuple[Metric, ...]


Exchange = Callable[[Mapping[str, Counted]], Awaitable[tuple[str, Mapping[str, Counted]]]]
"""Tells the holder counts of gateways by name, and returns its name and what it holds then."""


def added_up(all_counted: Iterable[Counted]) -> list[Metric]:
    """The families of all gateways. Samples with equal names and labels are added up."""
    families: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for counted in all_counted:
        for one in counted.families:
            if one.name not in families:
                families[one.name] = Metric(one.name, one.documentation, one.type)
            of_family = values.setdefault(one.name, {})
            for sample in one.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                before = of_family.get(key)
                if before is None:
                    of_family[key] = sample.value
                elif sample.name.endswith("_created"):  # When the first of them began.
                    of_family[key] = min(before, sample.value)
                else:
                    of_family[key] = before + sample.value
    for name, family in families.items():
        family.samples = [
            Sample(key, dict(labels), value) for (key, labels), value in values[name].items()
        ]
    return list(families.values())


class CountsHolder:
    """What gateways have counted, those that have ended included.

    A holder that was lost begins empty; gateways know it by its name, and tell it all they know.
    """

    def __init__(self) -> None:
        self.name = token_hex(8)
        self._held: dict[str, Counted] = {}
        self._heard_at: dict[str, float] = {}

    def exchange(self, told: Mapping[str, Counted], now: float) -> Mapping[str, Counted]:
        """Take what gateways have counted, and return what all have. `now`: in seconds."""
        for name, counted in told.items():
            if name not in self._held or counted.number > self._held[name].number:
                self._held[name] = counted
                self._heard_at[name] = now
        ended = sorted(
            (name for name, at in self._heard_at.items() if now - at > SILENT_SECONDS),
            key=self._heard_at.__getitem__,
        )
        while len(ended) > MAX_ENDED:
            oldest, into = ended.pop(0), self._held[ended[0]]
            both = tuple(added_up((self._held.pop(oldest), into)))
            self._held[ended[0]] = Counted(into.number, both)
            del self._heard_at[oldest]
        return self._held | {name: _without_gauges(self._held[name]) for name in ended}


def _without_gauges(counted: Counted) -> Counted:
    kept = tuple(one for one in counted.families if one.type != "gauge")
    return Counted(counted.number, kept)


class SharedCounts(Collector):
    """What a gateway and those beside it have counted. Use it with `async with`.

    `registry`: has the gateway's own metrics. `exchange`: reaches the holder; None: it is the only
    gateway. While the holder does not answer, the others' last counts are told.
    """

    def __init__(self, registry: CollectorRegistry, exchange: Exchange | None) -> None:
        self._registry = registry
        self._exchange = exchange
        self._name = token_hex(8)
        self._number = 0
        self._holder = ""
        self._others: Mapping[str, Counted] = {}
        self._telling: asyncio.Task[None] | None = None

    @property
    def is_shared(self) -> bool:
        return self._exchange is not None

    async def __aenter__(self) -> Self:
        if self.is_shared:
            self._telling = asyncio.create_task(self._tell())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.gather(self._telling, return_exceptions=True)
            await self.refresh()

    async def _tell(self) -> None:
        while True:
            await self.refresh()
            await asyncio.sleep(TELL_SECONDS)

    async def refresh(self) -> None:
        """Tell the holder what this gateway has counted, and learn what the others have."""
        if self._exchange is None:
            return
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                holder, held = await self._exchange({self._name: self._own()})
                # It has just begun, or is in place of one that was lost.
                if holder != self._holder:
                    known = {**self._others, self._name: self._own()}
                    self._holder, held = await self._exchange(known)
        except Exception as error:  # The next time may succeed, whatever the error is.
            _log.warning("the counts of other gateways are not to be had: %s", error)
            return
        self._others = {name: one for name, one in held.items() if name != self._name}

    def _own(self) -> Counted:
        self._number += 1
        return Counted(self._number, tuple(self._registry.collect()))

    def collect(self) -> Iterable[Metric]:
        """The families of all gateways, as of a registry: this one's as they are now."""
        if not self._others:
            return self._registry.collect()
        return added_up((self._own(), *self._others.values()))

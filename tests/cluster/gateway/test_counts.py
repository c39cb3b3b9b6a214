"""Gateways that share callers tell one sum, whichever is asked, and whichever of them has ended."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from prometheus_client import generate_latest
from prometheus_client.registry import CollectorRegistry

from cluster.gateway.counts import (
    MAX_ENDED,
    SILENT_SECONDS,
    Counted,
    CountsHolder,
    SharedCounts,
)
from cluster.gateway.metrics import GatewayMetrics
from tests.cluster.gateway.scraping import Scrape

pytestmark = pytest.mark.asyncio


class _Beside:
    """A gateway's metrics, and what it tells of all."""

    def __init__(self, place: _Place) -> None:
        self.metrics = GatewayMetrics()
        self.shared = SharedCounts(self.metrics.registry, place.exchange)

    async def scrape(self) -> Scrape:
        await self.shared.refresh()
        registry = CollectorRegistry()
        registry.register(self.shared)
        return Scrape(generate_latest(registry).decode())

    async def tokens(self) -> float:
        return (await self.scrape()).value("generation_tokens_total")

    def count(self, tokens: int) -> None:
        self.metrics.of_model("m").generation_tokens.inc(tokens)


class _Place:
    """Where the holder is. It may be lost, or replaced."""

    def __init__(self) -> None:
        self.holder: CountsHolder | None = CountsHolder()
        self.now = 0.0

    async def exchange(self, told: Mapping[str, Counted]) -> tuple[str, Mapping[str, Counted]]:
        if self.holder is None:
            raise ConnectionError("lost")
        return self.holder.name, self.holder.exchange(told, self.now)


async def test_a_scrape_of_any_gateway_tells_the_sum_of_all() -> None:
    place = _Place()
    one, other = _Beside(place), _Beside(place)
    for gateway, seconds in ((one, 0.5), (other, 3.0)):
        gateway.count(30)
        gateway.metrics.of_model("m").first_token.observe(seconds)
        gateway.metrics.http_requests.labels("GET", f"/{seconds}", "200").inc()
        gateway.metrics.http_open.inc()
        await gateway.shared.refresh()
    for gateway in (one, other):
        told = await gateway.scrape()
        assert told.value("generation_tokens_total") == 60
        assert told.value("time_to_first_token_seconds_sum") == 3.5
        assert told.value("time_to_first_token_seconds_bucket", le="1.0") == 1
        assert told.value("time_to_first_token_seconds_bucket", le="+Inf") == 2
        assert told.value("http_requests_total", path="/0.5") == 1
        assert told.value("http_requests_open") == 2
        first = Scrape(generate_latest(one.metrics.registry).decode())
        assert told.value("generation_tokens_created") == first.value("generation_tokens_created")


async def test_what_an_ended_gateway_counted_stays_and_what_it_had_open_goes() -> None:
    place = _Place()
    ended, left = _Beside(place), _Beside(place)
    ended.count(30)
    ended.metrics.http_open.inc()
    await ended.shared.refresh()
    place.now = SILENT_SECONDS + 1
    left.count(12)
    told = await left.scrape()
    assert (told.value("generation_tokens_total"), told.value("http_requests_open")) == (42, 0)
    for number in range(MAX_ENDED + 5):  # Each ends, and the record of them stays short.
        short = _Beside(place)
        short.count(1)
        place.now += SILENT_SECONDS + 1
        await left.shared.refresh()
        assert await short.tokens() == 42 + number + 1
    assert place.holder is not None
    assert len(place.holder.exchange({}, place.now)) <= MAX_ENDED + 2
    assert await left.tokens() == 42 + MAX_ENDED + 5


async def test_a_holder_that_is_lost_takes_no_count_with_it() -> None:
    place = _Place()
    ended, left = _Beside(place), _Beside(place)
    ended.count(30)
    await ended.shared.refresh()
    left.count(12)
    assert await left.tokens() == 42
    place.holder = None
    left.count(1)
    assert await left.tokens() == 43
    place.holder = CountsHolder()
    new = _Beside(place)
    new.count(1)
    assert await new.tokens() == 1, "nobody has told the new holder yet"
    assert await left.tokens() == 44
    assert await new.tokens() == 44

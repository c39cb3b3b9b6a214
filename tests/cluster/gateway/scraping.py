"""Reads what `/metrics` tells, with Prometheus's own parser."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from cluster.gateway import app
from tests.cluster.gateway.serving import Served


@pytest.fixture
def every_scrape_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No scrape gets the text of one before."""
    monkeypatch.setattr(app, "SCRAPE_SECONDS", 0.0)


@dataclass(frozen=True)
class Scrape:
    """One answer of `/metrics`."""

    text: str

    def samples(self) -> Iterator[Sample]:
        for family in text_string_to_metric_families(self.text):
            yield from family.samples

    def kinds(self) -> dict[str, str]:
        """The type of each metric by name, without the times at which counters began."""
        families = text_string_to_metric_families(self.text)
        named = {
            f"{one.name}_total" if one.type == "counter" else one.name: one.type for one in families
        }
        return {name: kind for name, kind in named.items() if not name.endswith("_created")}

    def value(self, name: str, **labels: str) -> float:
        """The value of `paceline:name`, summed over the labels that are not given."""
        found = [
            one.value
            for one in self.samples()
            if one.name == f"paceline:{name}" and labels.items() <= one.labels.items()
        ]
        if not found:
            raise KeyError(name)
        return sum(found)

    def labels(self) -> dict[str, set[str]]:
        """The names of labels of each sample's name."""
        found: dict[str, set[str]] = {}
        for one in self.samples():
            found.setdefault(one.name, set()).update(one.labels)
        return found


async def scrape(served: Served) -> Scrape:
    """The metrics now. `every_scrape_asks` must be in force."""
    answer: httpx2.Response = await served.http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    return Scrape(answer.text)

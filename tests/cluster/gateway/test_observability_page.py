"""docs/observability.md names every metric with its type, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import generate_latest

from cluster.gateway.metrics import DriverMetrics, DriverReport, GatewayMetrics
from paceline.generation import SpeculationStats, Stats, WorkerLife, WorkerStats
from tests.cluster.gateway.scraping import Scrape

PAGE = Path(__file__).resolve().parents[3] / "docs" / "observability.md"


def everything() -> Scrape:
    """A scrape of a gateway whose driver tells all that one can."""
    metrics, drivers = GatewayMetrics(), DriverMetrics()
    metrics.of_model("m")
    metrics.http_requests.labels("GET", "/health", "200").inc()
    metrics.registry.register(drivers)
    drafting = (700, 600)
    for scale in (1, 2):
        of_all = SpeculationStats(
            tuple(scale * n for n in drafting),
            tuple(scale * n for n in drafting),
            tuple(scale * n for n in (500, 300)),
            *(9, 8, 7, 6, 5, 0.1, 0.2, 0.3),
            choices={"chain": 4},
            estimates={"tokens_per_ms": 0.2, "plain_tokens_per_ms": 0.1},
        )
        worker = WorkerStats("drafter-0", "model", "h:1", 1, True, 1.0, 2, 3, 4, shares=2)
        life = WorkerLife("shard-0", 1, next_try_seconds=1.0)
        stats = Stats(
            *(1.0, 2, 3, 4, 5, 6, 7, 8, 0.5, (worker,)),
            speculation=of_all,
            lives=(life,),
            kv_blocks=8,
            kv_blocks_held=2,
        )
        drivers.take([DriverReport("h:2", "m", stats)])
    return Scrape(generate_latest(metrics.registry).decode())


def test_the_page_names_every_metric_with_its_type() -> None:
    rows = re.findall(r"^\| `(paceline:\w+)` \| (\w+) \|", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == len(dict(rows))
    assert dict(rows) == everything().kinds()

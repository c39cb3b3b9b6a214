"""What drafting inside vLLM counts, as Prometheus metrics on a port of its own.

The names are those of a driver (docs/observability.md), so that its dashboards serve here too. What
vLLM counts of speculation itself it goes on to tell on its own port.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.gateway.metrics import PREFIX, DriverMetrics, DriverReport
from paceline_vllm.drafting_thread import DraftingThread
from paceline_vllm.settings import MOST_WAIT_MS

_log = logging.getLogger(__name__)


class VllmMetrics(Collector):
    """Asks the drafting thread when it is scraped. `model`: vLLM's name of its model."""

    def __init__(self, model: str, thread: DraftingThread) -> None:
        self._model, self._thread = model, thread
        self._driver = DriverMetrics()

    def collect(self) -> Iterable[Metric]:
        self._driver.take([DriverReport("vllm", self._model, self._thread.stats())])
        yield from self._driver.collect()
        counts = self._thread.counts
        counters = [
            ("vllm_hook_calls", "Calls of the hook.", counts.calls),
            ("vllm_hook_seconds", "Time that they took.", counts.seconds),
            ("vllm_hook_missed", "Calls that found the lock taken.", counts.missed),
            ("vllm_hook_failed", "Calls that a defect ended.", counts.failed),
        ]
        for name, says, value in counters:
            yield CounterMetricFamily(PREFIX + name, says, value=value)
        gauges = [
            ("vllm_hook_longest_seconds", "The longest call.", counts.longest),
            ("vllm_lock_wait_seconds", "Upper bound on a wait.", MOST_WAIT_MS / 1000),
        ]
        for name, says, value in gauges:
            yield GaugeMetricFamily(PREFIX + name, says, value=value)


def serve_metrics(port: int, model: str, thread: DraftingThread) -> None:
    """Serve the metrics on all addresses of the host. A port that is taken is only warned about."""
    registry = CollectorRegistry()
    registry.register(VllmMetrics(model, thread))
    try:
        start_http_server(port, registry=registry)
    except OSError as error:
        _log.warning("metrics are not served on port %d: %s", port, error)

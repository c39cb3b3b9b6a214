"""What drivers count, as Prometheus metrics: asked for when the gateway is scraped.

A counter is what the driver counts since it began. So it falls to 0 when the driver restarts, which
Prometheus takes for the reset that it is.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.gateway.metrics import PREFIX
from paceline.generation import Stats, WorkerLife, WorkerStats

RECENT_SECONDS = 600.0
"""What "recent" means in `acceptance_recent` and `acceptance_drift`."""

_SAMPLE_SECONDS = 15.0
"""Least time between two remembered counts, so at most 41 of a driver are remembered."""

LEAST_TRIED = 500
"""Candidates that must have been tried, recently and before, for an acceptance to be told. Then its
standard error is at most 2.3 %."""


@dataclass(frozen=True, slots=True)
class DriverReport:
    """What a driver said. `stats` is None if it did not answer. `model`: its name to callers."""

    address: str
    model: str | None
    stats: Stats | None


class AcceptanceDrift:
    """The acceptance of a driver's candidates in the last RECENT_SECONDS, and before them.

    Acceptance is the chance of a candidate given that those before it were accepted, so that it
    does not depend on the length of windows.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int, int]] = deque()
        """Time, candidates tried and candidates accepted since the driver began."""
        self._now = (0.0, 0, 0)

    def add(self, now: float, tried: int, accepted: int) -> None:
        """Note the counts of a driver at a time in seconds."""
        if tried < self._now[1] or accepted < self._now[2]:
            self._samples.clear()  # The driver was restarted.
        self._now = (now, tried, accepted)
        if not self._samples or now - self._samples[-1][0] >= _SAMPLE_SECONDS:
            self._samples.append(self._now)
        while len(self._samples) > 1 and now - self._samples[1][0] >= RECENT_SECONDS:
            self._samples.popleft()

    @property
    def recent(self) -> float | None:
        """Recent acceptance; None: too little was tried."""
        _, tried, accepted = self._samples[0]
        return _share(self._now[2] - accepted, self._now[1] - tried)

    @property
    def drift(self) -> float | None:
        """Recent acceptance minus that before; None: too little was tried, recently or before."""
        recent, before = self.recent, _share(self._samples[0][2], self._samples[0][1])
        return None if recent is None or before is None else recent - before


def _share(accepted: int, tried: int) -> float | None:
    return accepted / tried if tried >= LEAST_TRIED else None


class DriverMetrics(Collector):
    """Tells Prometheus what the drivers reported last."""

    def __init__(self) -> None:
        self._reports: Sequence[DriverReport] = ()
        self._drifts: dict[str, AcceptanceDrift] = {}

    def take(self, reports: Sequence[DriverReport]) -> None:
        """Note the reports that the next scrape tells."""
        self._reports = reports
        present = {report.address for report in reports}
        self._drifts = {key: one for key, one in self._drifts.items() if key in present}
        for report in reports:
            if report.stats is not None:
                drafting = report.stats.speculation
                drift = self._drifts.setdefault(report.address, AcceptanceDrift())
                drift.add(time.monotonic(), sum(drafting.tried_at), sum(drafting.accepted_at))

    def collect(self) -> Iterable[Metric]:
        """Implements Collector."""
        families = _Families()
        for report in self._reports:
            families.gauge("driver_up", "1: the driver answered; 0: it did not.").add_metric(
                [report.address], float(report.stats is not None)
            )
            if report.stats is not None:
                labels = [report.model or "", report.address]
                _tell_driver(families, report.stats, labels)
                _tell_drafting(families, report.stats, labels, self._drifts[report.address])
                for worker in report.stats.workers:
                    _tell_worker(families, worker, report.address)
                for life in report.stats.lives:
                    _tell_life(families, life, report.address)
        return families.all()


_OF_DRIVER = ("model_name", "driver")


class _Families:
    """Metrics by name, each with the values of all drivers."""

    def __init__(self) -> None:
        self._counters: dict[str, CounterMetricFamily] = {}
        self._gauges: dict[str, GaugeMetricFamily] = {}

    def all(self) -> Iterator[Metric]:
        yield from self._gauges.values()
        yield from self._counters.values()

    def gauge(self, name: str, says: str, labels: Sequence[str] = ("driver",)) -> GaugeMetricFamily:
        if name not in self._gauges:
            self._gauges[name] = GaugeMetricFamily(PREFIX + name, says, labels=labels)
        return self._gauges[name]

    def counter(self, name: str, says: str, labels: Sequence[str]) -> CounterMetricFamily:
        if name not in self._counters:
            self._counters[name] = CounterMetricFamily(PREFIX + name, says, labels=labels)
        return self._counters[name]


def _tell_driver(families: _Families, stats: Stats, labels: list[str]) -> None:
    gauges: list[tuple[str, str, float | None]] = [
        ("num_requests_running", "Requests in batches.", stats.sequences_running),
        ("num_requests_waiting", "Requests that wait for a place.", stats.sequences_waiting),
        (
            "kv_cache_usage_perc",
            "Share of KV blocks that requests hold, 0 to 1.",
            stats.kv_blocks_held / stats.kv_blocks if stats.kv_blocks else None,
        ),
        ("target_gap_seconds", "Median time between two steps.", stats.gap_ms_p50 / 1000),
        ("driver_step_seconds", "Median work of a driver per step.", stats.driver_ms_p50 / 1000),
        ("driver_uptime_seconds", "Time since the driver began.", stats.uptime_seconds),
    ]
    for name, says, value in gauges:
        if value is not None:
            families.gauge(name, says, _OF_DRIVER).add_metric(labels, value)
    prompt_tokens = stats.prefilled_tokens + stats.prefix_hit_tokens
    counters = [
        ("driver_steps", "Forward passes of the target.", stats.steps),
        ("driver_verdicts", "Verdicts: steps, counted for each request.", stats.verdicts),
        ("driver_generation_tokens", "Committed tokens.", stats.committed_tokens),
        ("driver_prefill_tokens", "Prompt tokens that steps computed.", stats.prefilled_tokens),
        ("driver_requests", "Requests that ended.", stats.requests_finished),
        ("num_preemptions", "Requests that lost their KV blocks.", stats.preemptions),
        ("prefix_cache_queries", "Prompt tokens looked up in the cache.", prompt_tokens),
        ("prefix_cache_hits", "Those that the cache had.", stats.prefix_hit_tokens),
    ]
    for name, says, count in counters:
        families.counter(name, says, _OF_DRIVER).add_metric(labels, count)


def _tell_drafting(
    families: _Families, stats: Stats, labels: list[str], drift: AcceptanceDrift
) -> None:
    drafting = stats.speculation
    counters = [
        ("spec_decode_num_drafts", "Verdicts that had candidates.", sum(drafting.drafted_at[:1])),
        ("spec_decode_num_draft_tokens", "Candidates that steps verified.", stats.drafted),
        ("spec_decode_num_accepted_tokens", "Candidates that were accepted.", stats.accepted),
        ("spec_decode_num_proposed_tokens", "Tokens that drafters sent.", drafting.proposed),
        ("spec_decode_num_used_tokens", "Proposed tokens that were of use.", drafting.used),
        ("spec_decode_num_wasted_drafts", "Drafts that had nothing right.", drafting.wasted_steps),
        ("spec_decode_num_diverged", "Verdicts against the first candidate.", drafting.diverged),
        ("spec_decode_num_branch_hits", "Those that a branch had foreseen.", drafting.branch_hits),
    ]
    for name, says, count in counters:
        families.counter(name, says, _OF_DRIVER).add_metric(labels, count)
    positions = [
        ("spec_decode_num_accepted_tokens_per_pos", "Accepted candidates.", drafting.accepted_at),
        (
            "spec_decode_num_tried_tokens_per_pos",
            "Candidates of which all before were accepted.",
            drafting.tried_at,
        ),
    ]
    for name, says, counts in positions:
        family = families.counter(name, says, (*_OF_DRIVER, "position"))
        for position, count in enumerate(counts):
            family.add_metric([*labels, str(position)], count)
    estimates = drafting.estimates
    plain = estimates.get("plain_tokens_per_ms")
    speedup = estimates["tokens_per_ms"] / plain if plain and "tokens_per_ms" in estimates else None
    gauges = [
        ("target_idle_ratio", "Share of time without a pass.", drafting.target_idle),
        ("drafter_idle_ratio", "The same, mean over drafters.", drafting.drafter_idle),
        ("speculation_speedup", "Speed over plain decoding's, as auto estimates.", speedup),
        ("speculation_efficiency", "Tokens per largest possible number.", drafting.efficiency),
        ("acceptance_recent", "Acceptance of the last 10 minutes.", drift.recent),
        ("acceptance_drift", "The same minus acceptance before.", drift.drift),
    ]
    for name, says, value in gauges:
        if value is not None:
            families.gauge(name, says, _OF_DRIVER).add_metric(labels, value)
    family = families.counter("policy_verdicts", "Verdicts by policy.", (*_OF_DRIVER, "policy"))
    for policy, count in drafting.choices.items():
        family.add_metric([*labels, policy], count)


def _tell_worker(families: _Families, worker: WorkerStats, driver: str) -> None:
    names = ("driver", "worker", "kind")
    labels = [driver, worker.name, worker.kind]
    families.gauge("worker_up", "1: it has streams.", names).add_metric(labels, worker.connected)
    families.gauge("worker_suspect", "1: a drafter lied.", names).add_metric(labels, worker.suspect)
    if worker.shares:
        said = "Parties with sequences at a drafter."
        families.gauge("drafter_shares", said, names).add_metric(labels, worker.shares)
    counters = [
        ("worker_passes", "Forward passes.", worker.passes),
        ("worker_busy_seconds", "Time in forward passes.", worker.busy_seconds),
        ("worker_tokens", "Tokens proposed (drafters) or fed (target).", worker.tokens),
        ("worker_reconnects", "Times that it was lost and found again.", worker.reconnects),
        ("worker_malformed", "Malformed proposals.", worker.malformed),
    ]
    for name, says, count in counters:
        families.counter(name, says, names).add_metric(labels, count)


def _tell_life(families: _Families, life: WorkerLife, driver: str) -> None:
    names = ("driver", "worker")
    labels = [driver, life.name]
    restarts = families.counter("worker_restarts", "Processes started in place of others.", names)
    restarts.add_metric(labels, life.restarts)
    waits = families.gauge("worker_down", "1: it waits for its next start.", names)
    waits.add_metric(labels, float(life.next_try_seconds is not None))

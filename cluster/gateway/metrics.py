"""What a gateway measures of its own requests, and what its drivers count, as Prometheus metrics.

Names and buckets are vLLM's; docs/observability.md explains each. Labels take few values: models
that are served, paths that exist, statuses, reasons. Drivers are asked when the gateway is scraped.
A counter is what a driver counts since it began. So it falls to 0 when the driver restarts, which
Prometheus takes for the reset that it is.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.generation import (
    Chunk,
    Finished,
    GenerateEvent,
    RequestStats,
    Started,
    Stats,
    WorkerLife,
    WorkerStats,
)

PREFIX = "paceline:"

_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5) if power < 6)
"""vLLM's 1-2-5 series, up to 500,000 whatever the model's context is."""

ABORTED, FAILED = "abort", "error"
"""Reasons of a choice that did not end by itself: its caller left, or it failed."""

RECENT_SECONDS = 600.0
"""What "recent" means in `acceptance_recent` and `acceptance_drift`."""

_SAMPLE_SECONDS = 15.0
"""Least time between two remembered counts, so at most 41 of a driver are remembered."""

LEAST_TRIED = 500
"""Candidates that must have been tried, recently and before, for an acceptance to be told. Then its
standard error is at most 2.3 %."""


class _OfModel:
    def __init__(self, metrics: GatewayMetrics, model: str) -> None:
        self.prompt_tokens = metrics.prompt_tokens.labels(model)
        self.generation_tokens = metrics.generation_tokens.labels(model)
        self.first_token = metrics.first_token.labels(model)
        self.between_tokens = metrics.between_tokens.labels(model)
        self.per_token = metrics.per_token.labels(model)
        self.whole = metrics.whole.labels(model)
        self.prompt_length = metrics.prompt_length.labels(model)
        self.output_length = metrics.output_length.labels(model)
        self.ended = {
            reason: metrics.ended.labels(model, reason)
            for reason in ("stop", "length", ABORTED, FAILED)
        }


class GatewayMetrics:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, says: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, says, labels, registry=registry)

        def histogram(name: str, says: str, buckets: tuple[float, ...]) -> Histogram:
            labels = ["model_name"]
            return Histogram(PREFIX + name, says, labels, registry=registry, buckets=buckets)

        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests.", "model_name")
        self.generation_tokens = counter(
            "generation_tokens", "Tokens of answers, as they arrive.", "model_name"
        )
        self.ended = counter(
            "request_success", "Requests that ended, by reason.", "model_name", "finished_reason"
        )
        self.first_token = histogram(
            "time_to_first_token_seconds",
            "From the request to its first token.",
            _FIRST_TOKEN_SECONDS,
        )
        self.between_tokens = histogram(
            "inter_token_latency_seconds", "From one chunk of tokens to the next.", _TOKEN_SECONDS
        )
        self.per_token = histogram(
            "request_time_per_output_token_seconds",
            "Of a whole answer: time per token after the first.",
            _TOKEN_SECONDS,
        )
        self.whole = histogram(
            "e2e_request_latency_seconds", "From the request to its last token.", _REQUEST_SECONDS
        )
        self.prompt_length = histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", _TOKENS
        )
        self.output_length = histogram("request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self.http_requests = counter(
            "http_requests", "HTTP requests that ended.", "method", "path", "status"
        )
        self.http_open = Gauge(
            PREFIX + "http_requests_open", "HTTP requests that have not ended.", registry=registry
        )
        self._models: dict[str, _OfModel] = {}

    def of_model(self, model: str) -> _OfModel:
        if model not in self._models:
            self._models[model] = _OfModel(self, model)
        return self._models[model]


class RequestWatch:
    """Follows one HTTP request. Its fields are what the log says of the request at its end.

    `began`: by time.perf_counter. `seconds_to_first`: until the first token of any choice.
    """

    def __init__(self, metrics: GatewayMetrics) -> None:
        self.began = time.perf_counter()
        self.status = 0
        self.request_id: str | None = None
        self.model: str | None = None
        self.num_prompt_tokens = 0
        self.num_tokens = 0
        self.seconds_to_first: float | None = None
        self.finished: list[str] = []
        self.stats: list[RequestStats] = []
        self._metrics = metrics

    def choice(self, model: str) -> ChoiceWatch:
        """A watch for one more choice. What is served decides the names of models."""
        self.model = model
        return ChoiceWatch(self, self._metrics.of_model(model))

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per step over all choices that finished; None: there was no step."""
        steps = sum(one.steps for one in self.stats)
        tokens = sum(one.steps * one.acceptance_length for one in self.stats)
        return tokens / steps if steps else None


class ChoiceWatch:
    """Counts the events of one choice. vLLM counts each as a request of its own."""

    def __init__(self, request: RequestWatch, metrics: _OfModel) -> None:
        self._request = request
        self._metrics = metrics
        self._first: float | None = None
        self._last = 0.0
        self._num_tokens = 0
        self._reason: str | None = None

    def note(self, event: GenerateEvent) -> None:
        if isinstance(event, Chunk):
            if count := len(event.token_ids):
                self._took(count)
        elif isinstance(event, Started):
            count = len(event.prompt_token_ids)
            self._request.num_prompt_tokens += count
            self._metrics.prompt_tokens.inc(count)
            self._metrics.prompt_length.observe(count)
        elif isinstance(event, Finished):
            self._finish(event)

    def fail(self) -> None:
        self._reason = FAILED

    def end(self) -> None:
        """The choice is over. Unless it finished or failed, its caller has left."""
        reason = self._reason or ABORTED
        self._request.finished.append(reason)
        self._metrics.ended[reason].inc()

    def _took(self, count: int) -> None:
        now = time.perf_counter()
        if self._first is None:
            self._first = now
            waited = now - self._request.began
            self._metrics.first_token.observe(waited)
            if self._request.seconds_to_first is None:
                self._request.seconds_to_first = waited
        else:
            self._metrics.between_tokens.observe(now - self._last)
        self._last = now
        self._num_tokens += count
        self._request.num_tokens += count
        self._metrics.generation_tokens.inc(count)

    def _finish(self, event: Finished) -> None:
        self._request.stats.append(event.stats)
        if event.reason == "cancelled":
            return
        self._reason = event.reason
        self._metrics.whole.observe(time.perf_counter() - self._request.began)
        self._metrics.output_length.observe(self._num_tokens)
        if self._first is not None and self._num_tokens > 1:
            seconds = self._last - self._first
            self._metrics.per_token.observe(seconds / (self._num_tokens - 1))


# Drivers


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
        self._reports = reports
        present = {report.address for report in reports}
        self._drifts = {key: one for key, one in self._drifts.items() if key in present}
        for report in reports:
            if report.stats is not None:
                drafting = report.stats.speculation
                drift = self._drifts.setdefault(report.address, AcceptanceDrift())
                drift.add(time.monotonic(), sum(drafting.tried_at), sum(drafting.accepted_at))

    def collect(self) -> Iterable[Metric]:
        families = _Families()
        for report in self._reports:
            is_up = float(report.stats is not None)
            up = [("driver_up", "1: the driver answered; 0: it did not.", is_up)]
            families.tell(GaugeMetricFamily, ("driver",), [report.address], up)
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
_Family = CounterMetricFamily | GaugeMetricFamily
_Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]


class _Families:
    """Metrics by name, each with the values of all drivers."""

    def __init__(self) -> None:
        self._found: dict[str, _Family] = {}

    def all(self) -> Iterable[Metric]:
        return self._found.values()

    def family(self, kind: _Kind, names: Sequence[str], name: str, says: str) -> _Family:
        """The metric of this name, with the labels `names`."""
        if name not in self._found:
            self._found[name] = kind(PREFIX + name, says, labels=names)
        return self._found[name]

    def tell(
        self,
        kind: _Kind,
        names: Sequence[str],
        labels: Sequence[str],
        rows: Sequence[tuple[str, str, float | None]],
    ) -> None:
        """`rows`: names of metrics, what they say, and their values; None: it is not told."""
        for name, says, value in rows:
            family = self.family(kind, names, name, says)
            if value is not None:
                family.add_metric(labels, value)


def _tell_driver(families: _Families, stats: Stats, labels: list[str]) -> None:
    gauges = [
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
    families.tell(GaugeMetricFamily, _OF_DRIVER, labels, gauges)
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
    families.tell(CounterMetricFamily, _OF_DRIVER, labels, counters)


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
    families.tell(CounterMetricFamily, _OF_DRIVER, labels, counters)
    positions = [
        ("spec_decode_num_accepted_tokens_per_pos", "Accepted candidates.", drafting.accepted_at),
        (
            "spec_decode_num_tried_tokens_per_pos",
            "Candidates of which all before were accepted.",
            drafting.tried_at,
        ),
    ]
    for name, says, counts in positions:
        family = families.family(CounterMetricFamily, (*_OF_DRIVER, "position"), name, says)
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
    families.tell(GaugeMetricFamily, _OF_DRIVER, labels, gauges)
    names = (*_OF_DRIVER, "policy")
    verdicts = families.family(CounterMetricFamily, names, "policy_verdicts", "Verdicts by policy.")
    for policy, count in drafting.choices.items():
        verdicts.add_metric([*labels, policy], count)


def _tell_worker(families: _Families, worker: WorkerStats, driver: str) -> None:
    names = ("driver", "worker", "kind")
    labels = [driver, worker.name, worker.kind]
    gauges = [
        ("worker_up", "1: it has streams.", worker.connected),
        ("worker_suspect", "1: a drafter lied.", worker.suspect),
        ("drafter_shares", "Parties with sequences at a drafter.", worker.shares or None),
    ]
    families.tell(GaugeMetricFamily, names, labels, gauges)
    counters = [
        ("worker_passes", "Forward passes.", worker.passes),
        ("worker_busy_seconds", "Time in forward passes.", worker.busy_seconds),
        ("worker_tokens", "Tokens proposed (drafters) or fed (target).", worker.tokens),
        ("worker_reconnects", "Times that it was lost and found again.", worker.reconnects),
        ("worker_malformed", "Malformed proposals.", worker.malformed),
    ]
    families.tell(CounterMetricFamily, names, labels, counters)


def _tell_life(families: _Families, life: WorkerLife, driver: str) -> None:
    names, labels = ("driver", "worker"), [driver, life.name]
    restarts = [("worker_restarts", "Processes started in place of others.", life.restarts)]
    families.tell(CounterMetricFamily, names, labels, restarts)
    waits = float(life.next_try_seconds is not None)
    down = [("worker_down", "1: it waits for its next start.", waits)]
    families.tell(GaugeMetricFamily, names, labels, down)

"""What a gateway measures of its own requests, as Prometheus metrics with vLLM's names and buckets.

docs/observability.md explains each. What only drivers know is in driver_metrics.py. Labels take few
values: models that are served, paths that exist, statuses, reasons.
"""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from paceline.generation import Chunk, Finished, GenerateEvent, RequestStats, Started

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


class _OfModel:
    """The metrics of one model."""

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
    """The metrics of one gateway, in a registry of its own."""

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
        """The metrics of a model that is served."""
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
        """An event of the choice arrived."""
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
        """The choice failed."""
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

"""Spans of gateway and driver, as an OpenTelemetry receiver gets them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
import pytest_asyncio
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import (
    trace_service_pb2,
    trace_service_pb2_grpc,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace import TracerProvider

from cluster.driver.request_spans import MAX_STEP_EVENTS
from paceline import AsyncClient, Client
from paceline.channel import traceparent
from paceline.errors import ConfigError
from tests.cluster.gateway.serving import Served, connection, head, running_gateway
from tests.cluster.system import HOST, Checkpoints, System, eventually, running_system
from workers.process.tracing import Tracing, start_tracing

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKED: dict[str, Any] = {"prompt": "secret sea", "max_tokens": 80, "seed": 5, "ignore_eos": True}
PARENT = f"00-{'ab' * 16}-{'cd' * 8}-01"


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP receiver."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []
        """Each with the name of its service."""
        self.endpoint = ""

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for batch in request.resource_spans:
            service = attributes_of(batch.resource)["service.name"]
            for scope in batch.scope_spans:
                self.spans += [(service, span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    async def take(self, service: str, count: int = 1) -> list[Span]:
        """The next spans of a service, which are then forgotten."""

        def found() -> list[Span]:
            return [span for name, span in self.spans if name == service]

        await eventually(lambda: len(found()) >= count)
        taken = found()
        self.spans = [one for one in self.spans if one[0] != service]
        assert len(taken) == count
        return taken


def attributes_of(holder: Any) -> dict[str, Any]:
    """The attributes of a span, an event or a resource."""
    found: dict[str, Any] = {}
    for pair in holder.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        if kind == "array_value":
            value = [one.string_value for one in value.values]
        found[pair.key] = value
    return found


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port(f"{HOST}:0")
    server.start()
    receiver.endpoint = f"http://{HOST}:{port}"
    yield receiver
    server.stop(None).wait()


def _tracing(receiver: Receiver, service: str) -> Tracing:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}
        tracing = start_tracing(service, environ, endpoint=receiver.endpoint)
    assert tracing is not None
    return tracing


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def traced(receiver: Receiver, checkpoints: Checkpoints) -> AsyncIterator[System]:
    tracing = _tracing(receiver, "driver")
    drafters = {"d0": checkpoints.drafter}
    async with running_system(checkpoints, drafters=drafters, tracing=tracing) as system:
        yield system
    tracing.provider.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(receiver: Receiver, traced: System) -> AsyncIterator[Served]:
    tracing = _tracing(receiver, "gateway")
    async with running_gateway([traced.server.address], tracing=tracing) as served:
        await served.http.get("/health")
        await receiver.take("gateway")
        yield served
    tracing.provider.shutdown()


async def test_a_request_is_traced_from_http_to_steps(front: Served, receiver: Receiver) -> None:
    answer = await front.http.post(
        "/v1/completions",
        json=ASKED | {"speculation": {"policy": "lockstep", "window": 4}},
        headers={"traceparent": PARENT},
    )
    told = answer.json()
    (http,), (driver,) = await receiver.take("gateway"), await receiver.take("driver")
    assert http.trace_id == driver.trace_id == bytes.fromhex("ab" * 16)
    assert http.parent_span_id == bytes.fromhex("cd" * 8)
    assert driver.parent_span_id == http.span_id
    assert http.name == driver.name == "text_completion target"
    assert http.kind == driver.kind == Span.SPAN_KIND_SERVER
    attributes = attributes_of(http)
    assert attributes["http.response.status_code"] == 200
    assert attributes["http.route"] == "/v1/completions"
    for one, name in ((attributes, told["id"]), (attributes_of(driver), f"{told['id']}-0")):
        assert one["gen_ai.operation.name"] == "text_completion"
        assert one["gen_ai.request.model"] == "target"
        assert one["gen_ai.usage.output_tokens"] == 80
        assert one["gen_ai.usage.input_tokens"] == told["usage"]["prompt_tokens"]
        assert one["gen_ai.response.finish_reasons"] == ["length"]
        assert one["gen_ai.response.id"] == name
    drafting = told["metrics"]["speculative_decoding"]
    of_driver = attributes_of(driver)
    assert of_driver["paceline.accepted_tokens"] == drafting["num_accepted_draft_tokens"] > 0
    assert of_driver["gen_ai.request.max_tokens"] == 80
    names = [event.name for event in driver.events]
    assert names[:3] == ["prefill", "first_token", "step"]
    steps = [attributes_of(event) for event in driver.events if event.name == "step"]
    assert sum(step["paceline.tokens"] for step in steps) == 80
    assert (
        sum(step["paceline.accepted_tokens"] for step in steps)
        == drafting["num_accepted_draft_tokens"]
    )
    times = [event.time_unix_nano for event in driver.events]
    assert times == sorted(times)
    assert http.start_time_unix_nano <= driver.start_time_unix_nano <= times[0]
    assert driver.end_time_unix_nano <= http.end_time_unix_nano
    assert "secret" not in str((http, driver))
    assert told["choices"][0]["text"] not in str((http, driver))


async def test_steps_are_told_one_by_one_only_at_first(front: Served, receiver: Receiver) -> None:
    await front.complete(**ASKED | {"max_tokens": 200, "speculation": "off"})
    await receiver.take("gateway")
    (driver,) = await receiver.take("driver")
    assert [event.name for event in driver.events].count("step") == MAX_STEP_EVENTS
    assert attributes_of(driver)["paceline.steps"] == 200


async def test_what_fails_is_an_error_and_who_leaves_is_not(
    front: Served, traced: System, receiver: Receiver
) -> None:
    await front.complete(prompt=1.5)
    await front.http.get("/unknown")
    refused, unknown = await receiver.take("gateway", 2)
    assert refused.name == "POST /v1/completions"
    assert attributes_of(refused)["http.response.status_code"] == 400
    assert refused.status.code == Status.STATUS_CODE_UNSET
    assert unknown.name == "other other"
    body = json.dumps(ASKED | {"max_tokens": 400, "stream": True}).encode()
    async with connection(front) as (reader, writer):
        writer.write(head(len(body)) + body)
        await reader.readuntil(b"data: ")
    (http,), (driver,) = await receiver.take("gateway"), await receiver.take("driver")
    assert attributes_of(http)["http.response.status_code"] == 499
    assert attributes_of(driver)["gen_ai.response.finish_reasons"] == ["cancelled"]
    assert attributes_of(driver)["gen_ai.usage.output_tokens"] < 400
    await traced.settle()


async def test_the_client_passes_the_trace_on(traced: System, receiver: Receiver) -> None:
    tracer = TracerProvider().get_tracer("a program")
    given: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True}
    with tracer.start_as_current_span("asking") as span:
        ids = span.get_span_context()
        async with AsyncClient(traced.server.address) as client:
            await client.generate("sea", **given)

        def ask() -> None:
            with trace.use_span(span), Client(traced.server.address) as client:
                client.generate("sea", **given)

        await _in_a_thread(ask)
    for one in await receiver.take("driver", 2):
        assert one.trace_id == ids.trace_id.to_bytes(16, "big")
        assert one.parent_span_id == ids.span_id.to_bytes(8, "big")


async def test_without_a_span_each_request_is_a_trace(traced: System, receiver: Receiver) -> None:
    assert traceparent() == ""
    for _ in range(2):
        await traced.client.generate("sea", max_tokens=2)
    first, second = await receiver.take("driver", 2)
    assert first.parent_span_id == second.parent_span_id == b""
    assert first.trace_id != second.trace_id


async def test_a_defect_of_tracing_stops_no_request(
    traced: System, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """This is the last test with these spans."""
    spans = traced.driver._dispatch.spans
    assert spans is not None
    monkeypatch.setattr(spans, "_note_tokens", lambda emit: 1 / 0)
    answer = await traced.client.generate("sea", max_tokens=8, ignore_eos=True)
    assert len(answer.token_ids) == 8
    assert "a defect ended the tracing" in caplog.text


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:1", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:1", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
async def test_traces_are_off_unless_they_are_wanted(environ: dict[str, str]) -> None:
    assert start_tracing("x", environ) is None


async def test_an_unknown_protocol_is_refused() -> None:
    environ = {"OTEL_EXPORTER_OTLP_PROTOCOL": "smoke"}
    with pytest.raises(ConfigError, match='"grpc" or "http/protobuf", got "smoke"'):
        start_tracing("x", environ, endpoint="http://h:1")


async def _in_a_thread(work: Any) -> None:
    import asyncio

    await asyncio.to_thread(work)

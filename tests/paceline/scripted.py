"""A small server with prepared answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc

from paceline import (
    Chunk,
    Finished,
    ModelDescription,
    RequestStats,
    SamplingParams,
    SpeculationStats,
    Started,
    Stats,
    WorkerStats,
)
from paceline.errors import InternalError, PacelineError
from paceline.status import status_of
from paceline.v1 import inference_pb2, inference_pb2_grpc
from paceline.wire.answers import event_to_wire, failure_to_wire
from paceline.wire.server import description_to_wire, stats_to_wire

STATS = Stats(2.5, 10, 40, 32, 30, 3, 1, 0, 0.5,
              (WorkerStats("d", "ngram", "h:1", 7, True, 1.5, 10, 60, 2, 3, True),),
              verdicts=20,
              speculation=SpeculationStats((9, 8), (9, 5), (5,), 40, 7, 4, 3, 2, target_idle=0.25),
              )  # fmt: skip
DRAFTING = SpeculationStats((4, 2), (4, 2), (2, 1), 9, 4, 2, 0, 0, 0.5, 0.0, 0.75)
DESCRIPTION = ModelDescription(
    "tiny", 384, 512, (2, 0), SamplingParams(temperature=0.5, logit_bias={3: 1.0}),
    ("off", "lockstep", "chain"), "chain", 8,
)  # fmt: skip
EVENTS = (
    Started("mine", 2**64 - 1, (5, 6)),
    Chunk(0, (7, 8), ("draft", "target"), "hé", ("h", "é")),
    Chunk(2, (9,), ("target",), "!", ("!",)),
    Finished("stop", RequestStats(2, 4, 1, 1.5, 0.25, 0.125, {"entropy": 0.5}, DRAFTING)),
)


class Scripted(inference_pb2_grpc.InferenceServiceServicer):
    """The prompt "endless" never ends, "error" is answered with `error`, others with `EVENTS`."""

    def __init__(self) -> None:
        self.error: PacelineError = InternalError("unset")
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.cancelled = threading.Event()

    def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> Iterator[inference_pb2.GenerateResponse]:
        self.requests.append(request)
        if request.prompt == "error":
            code, details, metadata = status_of(self.error)
            context.set_trailing_metadata(metadata)
            context.abort(code, details)
        if request.prompt == "endless":
            context.add_callback(self.cancelled.set)
            yield event_to_wire(EVENTS[0])
            yield event_to_wire(EVENTS[1])
            self.cancelled.wait(240)
            return
        yield from map(event_to_wire, EVENTS[: -1 if request.prompt == "torn" else None])

    def GenerateMany(
        self, request_iterator: Iterator[inference_pb2.GenerateManyRequest], context: Any
    ) -> Iterator[inference_pb2.GenerateManyResponse]:
        for message in request_iterator:
            if message.HasField("cancel"):
                self.cancelled.set()
                continue
            self.requests.append(message.begin)
            answer = inference_pb2.GenerateManyResponse()
            if message.begin.prompt == "error":
                answer.responses.add(number=message.number, failed=failure_to_wire(self.error))
            else:
                events = EVENTS[:2] if message.begin.prompt == "endless" else EVENTS
                for event in events:
                    answer.responses.add(number=message.number, response=event_to_wire(event))
            if message.begin.prompt == "aborted":
                context.abort(grpc.StatusCode.UNAVAILABLE, "the server goes away")
            yield answer

    def DescribeModel(self, request: Any, context: Any) -> inference_pb2.DescribeModelResponse:
        return description_to_wire(DESCRIPTION)

    def Stats(self, request: Any, context: Any) -> inference_pb2.StatsResponse:
        return stats_to_wire(STATS)

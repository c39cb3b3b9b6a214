"""Between the answers of InferenceService (inference.proto) and plain values."""

from __future__ import annotations

from typing import Any

import grpc

from paceline.convert import sampling_from_wire, sampling_to_wire
from paceline.errors import PacelineError, ProtocolError
from paceline.generation import (
    Chunk,
    Finished,
    FinishReason,
    GenerateEvent,
    ModelDescription,
    Origin,
    Started,
)
from paceline.request_wire import POLICIES, POLICY_NAMES
from paceline.stats_wire import request_stats_from_wire, request_stats_to_wire
from paceline.status import error_told, status_of
from paceline.v1 import inference_pb2, types_pb2

# Enum numbers have a type of their own in the stubs for each use; Any stands for all of them.
_REASONS: dict[FinishReason, Any] = {
    "stop": inference_pb2.FINISH_REASON_STOP,
    "length": inference_pb2.FINISH_REASON_LENGTH,
    "cancelled": inference_pb2.FINISH_REASON_CANCELLED,
}
_REASON_NAMES: dict[int, FinishReason] = {number: name for name, number in _REASONS.items()}
_ORIGINS: dict[Origin, Any] = {
    "target": types_pb2.TOKEN_ORIGIN_TARGET,
    "draft": types_pb2.TOKEN_ORIGIN_DRAFT,
}
_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}
_ORIGIN_NAMES: dict[int, Origin] = {number: name for name, number in _ORIGINS.items()}


def event_to_wire(event: GenerateEvent) -> inference_pb2.GenerateResponse:
    """The message of one event of a stream."""
    response = inference_pb2.GenerateResponse()
    fill_response(response, event)
    return response


def fill_response(response: inference_pb2.GenerateResponse, event: GenerateEvent) -> None:
    """Make an empty message that of an event: where it is part of another, nothing is copied."""
    match event:
        case Chunk():
            chunk = response.chunk
            chunk.offset = event.offset
            chunk.token_ids.extend(event.token_ids)
            chunk.origins.extend([_ORIGINS[origin] for origin in event.origins])
            chunk.text = event.text
            chunk.pieces.extend(event.pieces)
            chunk.SetInParent()
        case Started():
            started = response.started
            started.request_id = event.request_id
            started.seed = event.seed
            started.prompt_token_ids.extend(event.prompt_token_ids)
            started.SetInParent()
        case Finished():
            response.finished.reason = _REASONS[event.reason]
            response.finished.stats.CopyFrom(request_stats_to_wire(event.stats))


def failure_to_wire(error: PacelineError) -> inference_pb2.RequestFailed:
    """What a request of a GenerateMany stream is told that ended so."""
    code, details, metadata = status_of(error)
    return inference_pb2.RequestFailed(code=code.value[0], details=details, metadata=dict(metadata))


def failure_from_wire(failed: inference_pb2.RequestFailed, address: str) -> PacelineError:
    """The error that the server at `address` told."""
    code = _STATUS_CODES.get(failed.code, grpc.StatusCode.UNKNOWN)
    return error_told(code, failed.details, failed.metadata, address)


class EventReader:
    """Reads what one request of the server at `address` is answered, in its order."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._num_tokens: int | None = None
        """Output tokens so far; None before `Started`."""
        self._finished = False

    def read(self, response: inference_pb2.GenerateResponse) -> GenerateEvent:
        """The event of a message. Raises ProtocolError for one that cannot come now."""
        kind = response.WhichOneof("message")
        if self._finished:
            raise self._broken("nothing after finished", kind)
        if self._num_tokens is None:
            if kind != "started":
                raise self._broken("started as the first answer", kind)
            self._num_tokens = 0
            started = response.started
            return Started(started.request_id, started.seed, tuple(started.prompt_token_ids))
        match kind:
            case "chunk":
                chunk = response.chunk
                if chunk.offset != self._num_tokens:
                    raise self._broken(f"token {self._num_tokens} next", f"token {chunk.offset}")
                self._num_tokens += len(chunk.token_ids)
                return Chunk(
                    offset=chunk.offset,
                    token_ids=tuple(chunk.token_ids),
                    origins=tuple(_ORIGIN_NAMES.get(origin, "target") for origin in chunk.origins),
                    text=chunk.text,
                    pieces=tuple(chunk.pieces),
                )
            case "finished":
                self._finished = True
                return Finished(
                    reason=_REASON_NAMES.get(response.finished.reason, "stop"),
                    stats=request_stats_from_wire(response.finished.stats),
                )
            case _:
                raise self._broken("chunk or finished", kind)

    def end(self) -> None:
        """The stream has ended well. Raises ProtocolError where an answer is missing."""
        if not self._finished:
            raise self._broken("finished as the last answer", None)

    def _broken(self, expected: str, got: str | None) -> ProtocolError:
        return ProtocolError(
            f"expected {expected} from the server at {self._address}, got {got or 'nothing'} after "
            f"{self._num_tokens or 0} tokens; please report this"
        )


def description_to_wire(description: ModelDescription) -> inference_pb2.DescribeModelResponse:
    """The message of what is served."""
    return inference_pb2.DescribeModelResponse(
        model=description.model,
        vocab_size=description.vocab_size,
        max_model_len=description.max_model_len,
        end_token_ids=description.end_token_ids,
        default_sampling=sampling_to_wire(description.default_sampling),
        policies=[POLICIES[name] for name in description.policies],
        default_policy=POLICIES[description.default_policy],
        default_window=description.default_window,
    )


def description_from_wire(response: inference_pb2.DescribeModelResponse) -> ModelDescription:
    """What is served, of a message. Policies that this version does not know are left out."""
    return ModelDescription(
        model=response.model,
        vocab_size=response.vocab_size,
        max_model_len=response.max_model_len,
        end_token_ids=tuple(response.end_token_ids),
        default_sampling=sampling_from_wire(response.default_sampling),
        policies=tuple(POLICY_NAMES[p] for p in response.policies if p in POLICY_NAMES),
        default_policy=POLICY_NAMES.get(response.default_policy, str(response.default_policy)),
        default_window=response.default_window,
    )

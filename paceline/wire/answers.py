"""The answers to a request as messages (inference.proto), and the log probabilities in them."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.errors import PacelineError, ProtocolError
from paceline.generation import (
    Chunk,
    Finished,
    FinishReason,
    GenerateEvent,
    Origin,
    RequestStats,
    SpeculationStats,
    Started,
    TokenLogprobs,
)
from paceline.quiet_grpc import grpc
from paceline.status import error_told, status_of
from paceline.v1 import inference_pb2, types_pb2
from paceline.wire.fields import read_fields, values_of

PADDED_TO = 128
"""The size of a padded chunk is a multiple of this many bytes. Few tokens have more text."""

_REASONS: dict[FinishReason, inference_pb2.FinishReason.ValueType] = {
    "stop": inference_pb2.FINISH_REASON_STOP,
    "length": inference_pb2.FINISH_REASON_LENGTH,
    "cancelled": inference_pb2.FINISH_REASON_CANCELLED,
}
_ORIGINS: dict[Origin, types_pb2.TokenOrigin.ValueType] = {
    "target": types_pb2.TOKEN_ORIGIN_TARGET,
    "draft": types_pb2.TOKEN_ORIGIN_DRAFT,
}
_REASON_NAMES: dict[int, FinishReason] = {number: name for name, number in _REASONS.items()}
_ORIGIN_NAMES: dict[int, Origin] = {number: name for name, number in _ORIGINS.items()}
_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}


def event_to_wire(event: GenerateEvent) -> inference_pb2.GenerateResponse:
    response = inference_pb2.GenerateResponse()
    fill_response(response, event)
    return response


def fill_response(response: inference_pb2.GenerateResponse, event: GenerateEvent) -> None:
    """Write an event into an empty message, which may be part of another: that saves a copy."""
    match event:
        case Chunk():
            response.sample = event.sample
            chunk = response.chunk
            for one in event.logprobs:
                fill_logprobs(chunk.logprobs.add(), one)
            for one in event.prompt_logprobs:
                fill_logprobs(chunk.prompt_logprobs.add(), one)
            chunk.offset = event.offset
            chunk.token_ids.extend(event.token_ids)
            chunk.origins.extend([_ORIGINS[origin] for origin in event.origins])
            chunk.text = event.text
            chunk.pieces.extend(event.pieces)
            chunk.refused.extend(event.refused)
            chunk.SetInParent()
            if event.padded and (missing := -chunk.ByteSize() % PADDED_TO):
                # The field itself takes two bytes.
                chunk.padding = bytes(missing - 2 if missing > 1 else PADDED_TO - 1)
        case Started():
            started = response.started
            started.request_id = event.request_id
            started.seed = event.seed
            started.prompt_token_ids.extend(event.prompt_token_ids)
            started.in_reasoning = event.in_reasoning
            started.SetInParent()
        case Finished():
            response.sample = event.sample
            response.finished.reason = _REASONS[event.reason]
            response.finished.stop = event.stop
            counts = values_of(event.stats)
            counts["speculation"] = inference_pb2.SpeculationStats(
                **values_of(event.stats.speculation)
            )
            response.finished.stats.CopyFrom(inference_pb2.RequestStats(**counts))


def fill_logprobs(message: types_pb2.TokenLogprobs, one: TokenLogprobs) -> None:
    if one.logprob is not None:
        message.logprob = one.logprob
        message.rank = one.rank
        message.top_ids.extend(one.top_ids)
        message.top_logprobs.extend(one.top_logprobs)
    message.token = one.token
    message.top_tokens.extend(one.top_tokens)


def logprobs_from_wire(messages: Iterable[types_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        [
            TokenLogprobs(
                message.logprob if message.HasField("logprob") else None,
                message.rank,
                tuple(message.top_ids),
                tuple(message.top_logprobs),
                message.token,
                tuple(message.top_tokens),
            )
            for message in messages
        ]
    )


class EventReader:
    """Reads the answers to one request, in order. Errors name the server's `address`."""

    def __init__(self, address: str, request: inference_pb2.GenerateRequest) -> None:
        self._address = address
        resumed = [len(one.token_ids) for one in request.resume_samples] or [len(request.resume)]
        self.num_samples = request.samples or 1
        self._num_tokens = resumed + [0] * (self.num_samples - len(resumed))
        """Output tokens of each sample that the caller has."""
        self._has_started = False
        self._open = set(range(self.num_samples))
        """Samples that have not finished."""

    @property
    def is_over(self) -> bool:
        return not self._open

    def read(self, response: inference_pb2.GenerateResponse) -> GenerateEvent:
        """The event of a message. Raises ProtocolError for one that is out of order."""
        kind = response.WhichOneof("message")
        if self.is_over:
            raise self._broken("nothing after finished", kind)
        if not self._has_started:
            if kind != "started":
                raise self._broken("started as the first answer", kind)
            self._has_started = True
            started = response.started
            return Started(
                started.request_id,
                started.seed,
                tuple(started.prompt_token_ids),
                started.in_reasoning,
            )
        sample = response.sample
        if sample not in self._open:
            raise self._broken("a sample that has not finished", f"sample {sample}")
        match kind:
            case "chunk":
                chunk, num_tokens = response.chunk, self._num_tokens[sample]
                if chunk.offset != num_tokens:
                    raise self._broken(f"token {num_tokens} next", f"token {chunk.offset}")
                self._num_tokens[sample] += len(chunk.token_ids)
                return Chunk(
                    offset=chunk.offset,
                    token_ids=tuple(chunk.token_ids),
                    origins=tuple(_ORIGIN_NAMES.get(origin, "target") for origin in chunk.origins),
                    text=chunk.text,
                    pieces=tuple(chunk.pieces),
                    logprobs=logprobs_from_wire(chunk.logprobs),
                    prompt_logprobs=logprobs_from_wire(chunk.prompt_logprobs),
                    sample=sample,
                    refused=tuple(chunk.refused),
                )
            case "finished":
                self._open.remove(sample)
                reason = _REASON_NAMES.get(response.finished.reason, "stop")
                counts = response.finished.stats
                speculation = read_fields(SpeculationStats, counts.speculation)
                stats = read_fields(RequestStats, counts, speculation=speculation)
                return Finished(reason, stats, sample, response.finished.stop)
            case _:
                raise self._broken("chunk or finished", kind)

    def end(self) -> None:
        """The stream has ended without an error. Raises ProtocolError if an answer is missing."""
        if not self.is_over:
            raise self._broken("finished as the last answer", None)

    def _broken(self, expected: str, got: str | None) -> ProtocolError:
        return ProtocolError(
            f"expected {expected} from the server at {self._address}, got {got or 'nothing'} after "
            f"{sum(self._num_tokens)} tokens; please report this"
        )


def failure_to_wire(error: PacelineError) -> inference_pb2.RequestFailed:
    """The last answer to a request of a GenerateMany stream that ended with `error`."""
    code, details, metadata = status_of(error)
    return inference_pb2.RequestFailed(code=code.value[0], details=details, metadata=dict(metadata))


def failure_from_wire(failed: inference_pb2.RequestFailed, address: str) -> PacelineError:
    """The error in an answer of the server at `address`."""
    code = _STATUS_CODES.get(failed.code, grpc.StatusCode.UNKNOWN)
    return error_told(code, failed.details, failed.metadata, address)

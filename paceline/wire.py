"""Converts between the messages of proto/paceline/v1 and the plain values of this package.

Names, sampling parameters and sequences (types.proto) come first, then a request, its answers and
the counters of a server (inference.proto).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor

from paceline.errors import InvalidRequestError, PacelineError, PromptTooLongError, ProtocolError
from paceline.generation import (
    CallerInput,
    Chunk,
    Finished,
    FinishReason,
    GenerateEvent,
    GenerateInput,
    Message,
    ModelDescription,
    Origin,
    RequestStats,
    SpeculationStats,
    Started,
    Stats,
    WorkerLife,
    WorkerStats,
    text_of_content,
)
from paceline.limits import MAX_MESSAGES, MAX_PROMPT_BYTES, MAX_SEQUENCE_TOKENS
from paceline.options import OPTION_NAMES, GenerateOptions, Stopping, check_count, check_option
from paceline.quiet_grpc import grpc
from paceline.sampling import SamplingParams, SequenceSpec
from paceline.status import error_told, status_of
from paceline.v1 import inference_pb2, types_pb2

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Value = TypeVar("_Value", bound="DataclassInstance")

ANY_VOCABULARY = 1 << 32
"""A vocabulary size that exceeds every uint32 token id."""

# The stubs give the numbers of each enum a type of its own. Any stands for all of them.
_STOPPINGS: dict[str, Any] = {
    Stopping.FIXED.value: types_pb2.STOPPING_RULE_FIXED,
    Stopping.ADAEDL.value: types_pb2.STOPPING_RULE_ADAEDL,
    Stopping.CONFIDENCE.value: types_pb2.STOPPING_RULE_CONFIDENCE,
    Stopping.COST.value: types_pb2.STOPPING_RULE_COST,
}
_REASONS: dict[FinishReason, Any] = {
    "stop": inference_pb2.FINISH_REASON_STOP,
    "length": inference_pb2.FINISH_REASON_LENGTH,
    "cancelled": inference_pb2.FINISH_REASON_CANCELLED,
}
_ORIGINS: dict[Origin, Any] = {
    "target": types_pb2.TOKEN_ORIGIN_TARGET,
    "draft": types_pb2.TOKEN_ORIGIN_DRAFT,
}
_STOPPING_NAMES: dict[int, str] = {number: name for name, number in _STOPPINGS.items()}
_REASON_NAMES: dict[int, FinishReason] = {number: name for name, number in _REASONS.items()}
_ORIGIN_NAMES: dict[int, Origin] = {number: name for name, number in _ORIGINS.items()}
_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}

_ENUMS = {"stopping": _STOPPINGS}
"""Options that are names here and numbers on the wire."""

_EXPECTED = {
    FieldDescriptor.CPPTYPE_UINT32: f"an integer from 0 to {2**32 - 1}",
    FieldDescriptor.CPPTYPE_UINT64: f"an integer from 0 to {2**64 - 1}",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_BOOL: "True or False",
    FieldDescriptor.CPPTYPE_STRING: "text of valid Unicode",
}
_TOKEN_IDS = f"a list of token ids, each an integer from 0 to {2**32 - 1}"
_EXPECTED_OF_MANY = {
    "logit_bias": "a table from token ids to numbers",
    "stop": "a list of strings",
    "stop_token_ids": _TOKEN_IDS,
}
_SHOWN = 200
"""Longest representation of a wrong value in an error, in characters."""


# Names, sampling parameters and sequences


def stopping_to_wire(stopping: Stopping) -> types_pb2.StoppingRule.ValueType:
    """The number of a stopping rule."""
    number: types_pb2.StoppingRule.ValueType = _STOPPINGS[stopping.value]
    return number


def stopping_from_wire(number: int) -> Stopping:
    """The stopping rule of a number; unspecified means fixed.

    Raises InvalidRequestError, which names the field `stopping`.
    """
    if number == types_pb2.STOPPING_RULE_UNSPECIFIED:
        return Stopping.FIXED
    return Stopping(_known_name("stopping", number))


def _known_name(field: str, number: int) -> str:
    """The name of an enum's number. Raises InvalidRequestError."""
    numbers = _ENUMS[field]
    for name, known in numbers.items():
        if known == number:
            return name
    expected = ", ".join(f"{name} ({known})" for name, known in numbers.items())
    raise InvalidRequestError(field, f"expected one of {expected}, got {number}")


def spec_to_wire(spec: SequenceSpec) -> types_pb2.SequenceSpec:
    """The message for `spec`. Floats are rounded to float32, as the wire has them."""
    return types_pb2.SequenceSpec(
        sampling=types_pb2.SamplingParams(**_values_of(spec.sampling)),
        seed=spec.seed,
        sample_index=spec.sample_index,
        rule=spec.rule,
        prompt_length=spec.prompt_length,
        end_token_ids=spec.end_token_ids,
    )


def spec_from_wire(
    message: types_pb2.SequenceSpec, *, vocab_size: int = ANY_VOCABULARY
) -> SequenceSpec:
    """The plain value of a message, checked. Raises InvalidRequestError, which names the field.

    The rule is any name: the caller looks it up.
    """
    if not message.HasField("sampling"):
        raise InvalidRequestError("sampling", "expected sampling parameters, got none")
    sampling = _read(SamplingParams, message.sampling)
    sampling.validate(vocab_size)
    end_token_ids = tuple(message.end_token_ids)
    if end_token_ids and max(end_token_ids) >= vocab_size:
        raise InvalidRequestError(
            "end_token_ids",
            f"token id {max(end_token_ids)} is not in the vocabulary of {vocab_size}",
        )
    return SequenceSpec(
        sampling=sampling,
        seed=message.seed,
        prompt_length=message.prompt_length,
        sample_index=message.sample_index,
        end_token_ids=end_token_ids,
        rule=message.rule,
    )


# A request


def request_to_wire(
    generate_input: CallerInput, options: GenerateOptions
) -> inference_pb2.GenerateRequest:
    """The message of a request.

    Raises InvalidRequestError, which names the field, for a value that has the wrong type or is out
    of its bounds.
    """
    request = inference_pb2.GenerateRequest()
    _input_to_wire(generate_input, request)
    for name in OPTION_NAMES:
        value = getattr(options, name)
        if value is not None:
            _option_to_wire(name, value, request)
    _check_limits(request)
    return request


def _option_to_wire(name: str, value: Any, request: inference_pb2.GenerateRequest) -> None:
    message = _message_with(name, request)
    if name in _ENUMS:
        numbers = _ENUMS[name]
        if not isinstance(value, str) or value not in numbers:
            raise InvalidRequestError(name, f"expected one of {', '.join(numbers)}, got {value!r}")
        setattr(message, name, numbers[value])
    elif name == "stop" and isinstance(value, str):
        raise InvalidRequestError(name, "expected a list of strings, got a string; put it in one")
    elif name in _EXPECTED_OF_MANY:
        entries = getattr(message, name)
        add = entries.update if name == "logit_bias" else entries.extend
        _attempt(name, _EXPECTED_OF_MANY[name], value, lambda: add(value))
    else:
        _set(message, name, value)


def request_from_wire(
    request: inference_pb2.GenerateRequest,
) -> tuple[GenerateInput, GenerateOptions]:
    """Input and options of a message.

    Raises InvalidRequestError, which names the field, for a missing input, an unknown enum and a
    value that is out of its bounds.
    """
    _check_limits(request)
    options: dict[str, Any] = {name: _plain(value) for name, value in _given_options(request)}
    return _input_from_wire(request), GenerateOptions(**options)


def _given_options(request: inference_pb2.GenerateRequest) -> Iterator[tuple[str, Any]]:
    """The options that a message has, each with its value. An empty text is none.

    Raises InvalidRequestError, which names the field, for an unknown enum.
    """
    for name in OPTION_NAMES:
        message = _message_with(name, request)
        value = getattr(message, name)
        has_presence = message.DESCRIPTOR.fields_by_name[name].has_presence
        if message.HasField(name) if has_presence else value:
            yield name, _known_name(name, value) if name in _ENUMS else value


def _message_with(name: str, request: inference_pb2.GenerateRequest) -> Any:
    """The message that has the field of an option: the request, or its `sampling`."""
    return request.sampling if name in SamplingParams.__dataclass_fields__ else request


def _check_limits(request: inference_pb2.GenerateRequest) -> None:
    """Raise InvalidRequestError, which names the field, for a value that is out of its bounds.

    A request within these bounds fits into one message. Both ends check: a client before it sends,
    a server before it copies or tokenizes anything.
    """
    for name, value in _given_options(request):
        check_option(name, value)
    kind = request.WhichOneof("input") or "input"
    if kind == "messages":
        check_count(kind, len(request.messages.messages), MAX_MESSAGES, "messages")
    texts = [request.prompt]
    for chat_message in request.messages.messages:
        texts += (chat_message.role, chat_message.content)
    size = sum(len(text.encode()) for text in texts)
    check_count(kind, size, MAX_PROMPT_BYTES, "bytes of text", PromptTooLongError)
    num_tokens = len(request.prompt_token_ids.token_ids)
    check_count(kind, num_tokens, MAX_SEQUENCE_TOKENS, "tokens", PromptTooLongError)


def _input_to_wire(generate_input: CallerInput, request: inference_pb2.GenerateRequest) -> None:
    if isinstance(generate_input, str):
        _set(request, "prompt", generate_input)
        return
    expected = "expected text, token ids or messages, got"
    if not isinstance(generate_input, Iterable) or isinstance(generate_input, Mapping | bytes):
        raise InvalidRequestError("prompt", f"{expected} {generate_input!r}")
    items: list[Any] = list(generate_input)
    if not items:
        raise InvalidRequestError("prompt", f"{expected} none")
    if all(isinstance(item, Message | Mapping) for item in items):
        for one in map(_message_of, items):
            message = request.messages.messages.add()
            _set(message, "role", one.role, field="messages")
            _set(message, "content", text_of_content(one.content), field="messages")
        return
    token_ids = request.prompt_token_ids.token_ids
    _attempt("prompt_token_ids", _TOKEN_IDS, items, lambda: token_ids.extend(items))


def _message_of(item: Message | Mapping[str, Any]) -> Message:
    """The message of a table. Raises InvalidRequestError unless its keys are role and content."""
    if isinstance(item, Message):
        return item
    if item.keys() != {"role", "content"}:
        keys = ", ".join(map(str, item)) or "nothing"
        raise InvalidRequestError("messages", f"a message has a role and a content, got {keys}")
    return Message(item["role"], item["content"])


def _input_from_wire(request: inference_pb2.GenerateRequest) -> GenerateInput:
    match request.WhichOneof("input"):
        case "prompt":
            return request.prompt
        case "prompt_token_ids":
            return tuple(request.prompt_token_ids.token_ids)
        case "messages":
            return tuple(Message(m.role, m.content) for m in request.messages.messages)
        case _:
            raise InvalidRequestError(
                "input", "expected one of prompt, prompt_token_ids and messages, got none"
            )


def _set(message: Any, name: str, value: object, *, field: str | None = None) -> None:
    expected = _EXPECTED[message.DESCRIPTOR.fields_by_name[name].cpp_type]
    _attempt(field or name, expected, value, lambda: setattr(message, name, value))


def _attempt(field: str, expected: str, value: object, assign: Callable[[], None]) -> None:
    """Assign a value. Protobuf checks its type; its error becomes an InvalidRequestError."""
    try:
        assign()
    except (TypeError, ValueError, AttributeError) as error:
        got = repr(value)
        shown = got if len(got) <= _SHOWN else f"{got[:_SHOWN]}... ({error})"
        raise InvalidRequestError(field, f"expected {expected}, got {shown}") from error


# The answers to a request


def event_to_wire(event: GenerateEvent) -> inference_pb2.GenerateResponse:
    """The message of one event of a stream."""
    response = inference_pb2.GenerateResponse()
    fill_response(response, event)
    return response


def fill_response(response: inference_pb2.GenerateResponse, event: GenerateEvent) -> None:
    """Write an event into an empty message, which may be part of another: that saves a copy."""
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
            counts = _values_of(event.stats)
            counts["speculation"] = _speculation_to_wire(event.stats.speculation)
            response.finished.stats.CopyFrom(inference_pb2.RequestStats(**counts))


class EventReader:
    """Reads the answers to one request, in order. Errors name the server's `address`."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._num_tokens: int | None = None
        """Output tokens read; None before `Started`."""
        self._finished = False

    def read(self, response: inference_pb2.GenerateResponse) -> GenerateEvent:
        """The event of a message. Raises ProtocolError for one that is out of order."""
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
                reason = _REASON_NAMES.get(response.finished.reason, "stop")
                counts = response.finished.stats
                speculation = _read(SpeculationStats, counts.speculation)
                return Finished(reason, _read(RequestStats, counts, speculation=speculation))
            case _:
                raise self._broken("chunk or finished", kind)

    def end(self) -> None:
        """The stream has ended without an error. Raises ProtocolError if an answer is missing."""
        if not self._finished:
            raise self._broken("finished as the last answer", None)

    def _broken(self, expected: str, got: str | None) -> ProtocolError:
        return ProtocolError(
            f"expected {expected} from the server at {self._address}, got {got or 'nothing'} after "
            f"{self._num_tokens or 0} tokens; please report this"
        )


def failure_to_wire(error: PacelineError) -> inference_pb2.RequestFailed:
    """The last answer to a request of a GenerateMany stream that ended with `error`."""
    code, details, metadata = status_of(error)
    return inference_pb2.RequestFailed(code=code.value[0], details=details, metadata=dict(metadata))


def failure_from_wire(failed: inference_pb2.RequestFailed, address: str) -> PacelineError:
    """The error in an answer of the server at `address`."""
    code = _STATUS_CODES.get(failed.code, grpc.StatusCode.UNKNOWN)
    return error_told(code, failed.details, failed.metadata, address)


# What is served, and counters


def description_to_wire(description: ModelDescription) -> inference_pb2.DescribeModelResponse:
    """The message of what is served."""
    return inference_pb2.DescribeModelResponse(
        model=description.model,
        vocab_size=description.vocab_size,
        max_model_len=description.max_model_len,
        end_token_ids=description.end_token_ids,
        default_sampling=types_pb2.SamplingParams(**_values_of(description.default_sampling)),
        policies=description.policies,
        default_policy=description.default_policy,
        default_window=description.default_window,
    )


def description_from_wire(response: inference_pb2.DescribeModelResponse) -> ModelDescription:
    """What is served, from a message."""
    return ModelDescription(
        model=response.model,
        vocab_size=response.vocab_size,
        max_model_len=response.max_model_len,
        end_token_ids=tuple(response.end_token_ids),
        default_sampling=_read(SamplingParams, response.default_sampling),
        policies=tuple(response.policies),
        default_policy=response.default_policy,
        default_window=response.default_window,
    )


def stats_to_wire(stats: Stats) -> inference_pb2.StatsResponse:
    """The message of the server's counters."""
    nested = {
        "workers": [inference_pb2.WorkerStats(**_values_of(one)) for one in stats.workers],
        "speculation": _speculation_to_wire(stats.speculation),
        "lives": [inference_pb2.WorkerLife(**_values_of(life)) for life in stats.lives],
    }
    return inference_pb2.StatsResponse(**_values_of(stats) | nested)


def stats_from_wire(response: inference_pb2.StatsResponse) -> Stats:
    """The server's counters, from a message."""
    return _read(
        Stats,
        response,
        workers=tuple(_read(WorkerStats, worker) for worker in response.workers),
        speculation=_read(SpeculationStats, response.speculation),
        lives=tuple(_read(WorkerLife, life) for life in response.lives),
    )


def _speculation_to_wire(stats: SpeculationStats) -> inference_pb2.SpeculationStats:
    return inference_pb2.SpeculationStats(**_values_of(stats))


# Dataclasses and messages whose fields have the same names


def _values_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by name. A message leaves out what is None."""
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _read(kind: type[_Value], message: Any, **nested: object) -> _Value:
    """A dataclass whose fields are in `nested`, or in the message. A missing one is None."""
    values = dict(nested)
    for name in kind.__dataclass_fields__.keys() - nested.keys():
        is_missing = message.DESCRIPTOR.fields_by_name[name].has_presence and not message.HasField(
            name
        )
        values[name] = None if is_missing else _plain(getattr(message, name))
    return kind(**values)


def _plain(value: Any) -> Any:
    """A field's value, with a dict or a tuple in place of protobuf's containers."""
    if isinstance(value, Mapping):
        return dict(value)
    return tuple(value) if isinstance(value, MutableSequence) else value

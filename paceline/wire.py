"""Converts between the messages of proto/paceline/v1 and the plain values of this package.

Names, sampling parameters and sequences (types.proto) come first, then a request, its answers and
the counters of a server (inference.proto).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor

from paceline.chat import (
    Chat,
    Message,
    ToolCall,
    json_text,
    message_of,
    text_of_content,
    texts_of,
)
from paceline.errors import InvalidRequestError, PacelineError, PromptTooLongError, ProtocolError
from paceline.generation import (
    CallerInput,
    Chunk,
    DefaultSpeculation,
    Finished,
    FinishReason,
    GenerateEvent,
    GenerateInput,
    ModelDescription,
    Origin,
    RequestStats,
    SpeculationStats,
    Started,
    Stats,
    TokenLogprobs,
    Tokens,
    Topology,
    TopologyWorker,
    WorkerLife,
    WorkerStats,
)
from paceline.limits import (
    MAX_MESSAGES,
    MAX_PROMPT_BYTES,
    MAX_SEQUENCE_TOKENS,
    MAX_TEMPLATE_KWARGS_BYTES,
    MAX_TOOLS_BYTES,
)
from paceline.options import OPTION_NAMES, GenerateOptions, Stopping, check_count, check_option
from paceline.quiet_grpc import grpc
from paceline.sampling import SamplingParams, SequenceSpec
from paceline.status import error_told, status_of
from paceline.structure import Structure, StructureKind
from paceline.v1 import inference_pb2, types_pb2

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Value = TypeVar("_Value", bound="DataclassInstance")

PADDED_TO = 128
"""The size of a padded chunk is a multiple of this many bytes. Few tokens have more text."""

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
_NUMBERS = (
    FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64,
    FieldDescriptor.CPPTYPE_FLOAT,
)
_TOKEN_IDS = f"a list of token ids, each an integer from 0 to {2**32 - 1}"
_EXPECTED_OF_MANY = {
    "logit_bias": "a table from token ids to numbers",
    "stop": "a list of strings",
    "stop_token_ids": _TOKEN_IDS,
    "resume": _TOKEN_IDS,
}
_MESSAGE_KEYS = {*Message.__dataclass_fields__, "reasoning", "refusal"}
"""What a message may have that came as a table, such as one of an answer."""
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
        structure=None if spec.structure is None else structure_to_wire(spec.structure),
        logprobs=spec.logprobs,
        prompt_logprobs=spec.prompt_logprobs,
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
    structure = structure_from_wire(message.structure) if message.HasField("structure") else None
    if structure is not None:
        check_option("structure", structure)
    end_token_ids = tuple(message.end_token_ids)
    if end_token_ids and max(end_token_ids) >= vocab_size:
        raise InvalidRequestError(
            "end_token_ids",
            f"token id {max(end_token_ids)} is not in the vocabulary of {vocab_size}",
        )
    spec = SequenceSpec(
        sampling=sampling,
        seed=message.seed,
        prompt_length=message.prompt_length,
        sample_index=message.sample_index,
        end_token_ids=end_token_ids,
        rule=message.rule,
        structure=structure,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
    )
    spec.validate_logprobs()
    return spec


def structure_to_wire(value: Structure) -> types_pb2.Structure:
    """The message for a structure."""
    match value.kind:
        case StructureKind.JSON_OBJECT:
            return types_pb2.Structure(json_object=types_pb2.JsonObject())
        case StructureKind.CHOICE:
            return types_pb2.Structure(choice=types_pb2.Choices(texts=value.choices))
        case kind:
            message = types_pb2.Structure()
            setattr(message, kind.value, value.text)
            return message


def structure_from_wire(message: types_pb2.Structure) -> Structure:
    """The plain value of a message; its size is checked elsewhere. Raises InvalidRequestError."""
    given = message.WhichOneof("kind")
    if given is None:
        kinds = ", ".join(kind.value for kind in StructureKind)
        raise InvalidRequestError("structure", f"expected one of {kinds}, got none")
    kind = StructureKind(given)
    if kind is StructureKind.JSON_OBJECT:
        return Structure(kind)
    if kind is StructureKind.CHOICE:
        return Structure(kind, choices=tuple(message.choice.texts))
    return Structure(kind, getattr(message, given))


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
    elif name == "structure":
        if not isinstance(value, Structure):
            raise InvalidRequestError(name, f"expected a Structure, got {value!r:.200}")
        _attempt(name, "text of valid Unicode", value, lambda: _set_structure(request, value))
    elif name == "stop" and isinstance(value, str):
        raise InvalidRequestError(name, "expected a list of strings, got a string; put it in one")
    elif name == "resume_samples":
        _attempt(
            name,
            f"for each sample {_TOKEN_IDS}",
            value,
            lambda: request.resume_samples.extend(
                [inference_pb2.TokenIds(token_ids=one) for one in value]
            ),
        )
    elif name in _EXPECTED_OF_MANY:
        entries = getattr(message, name)
        add = entries.update if name == "logit_bias" else entries.extend
        _attempt(name, _EXPECTED_OF_MANY[name], value, lambda: add(value))
    else:
        kind = message.DESCRIPTOR.fields_by_name[name].cpp_type
        if kind in _NUMBERS and isinstance(value, int | float) and not isinstance(value, bool):
            check_option(name, value)  # Its range says more than that of the field's type.
        _set(message, name, value)


def _set_structure(request: inference_pb2.GenerateRequest, value: Structure) -> None:
    request.structure.CopyFrom(structure_to_wire(value))


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
            if name == "structure":
                value = structure_from_wire(value)
            elif name == "resume_samples":
                value = tuple(tuple(one.token_ids) for one in value)
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
    _check_input_limits(request)


def _check_input_limits(
    request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest,
) -> None:
    kind = request.WhichOneof("input") or "input"
    texts = [request.prompt]
    if kind == "messages":
        chat = request.messages
        check_count(kind, len(chat.messages), MAX_MESSAGES, "messages")
        num_calls = sum(len(message.tool_calls) for message in chat.messages)
        num = len(chat.messages) + num_calls
        check_count(kind, num, MAX_MESSAGES, "messages and tool calls")
        _check_bytes("tools", chat.tools, MAX_TOOLS_BYTES)
        _check_bytes("template_kwargs", chat.template_kwargs, MAX_TEMPLATE_KWARGS_BYTES)
        for message in chat.messages:
            texts += texts_of(message)
    size = sum(len(text.encode()) for text in texts)
    check_count(kind, size, MAX_PROMPT_BYTES, "bytes of text", PromptTooLongError)
    if isinstance(request, inference_pb2.GenerateRequest):
        num_tokens = len(request.prompt_token_ids.token_ids)
        check_count(kind, num_tokens, MAX_SEQUENCE_TOKENS, "tokens", PromptTooLongError)


def _check_bytes(name: str, text: str, most: int) -> None:
    check_count(name, len(text.encode()), most, "bytes of JSON text")


def _input_to_wire(
    generate_input: CallerInput,
    request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest,
) -> None:
    if isinstance(generate_input, str):
        _set(request, "prompt", generate_input)
        return
    if isinstance(generate_input, Chat):
        _chat_to_wire(generate_input, request.messages)
        return
    expected = "expected text, token ids or messages, got"
    if not isinstance(generate_input, Iterable) or isinstance(generate_input, Mapping | bytes):
        raise InvalidRequestError("prompt", f"{expected} {generate_input!r}")
    items: list[Any] = list(generate_input)
    if not items:
        raise InvalidRequestError("prompt", f"{expected} none")
    if all(isinstance(item, Message | Mapping) for item in items):
        _chat_to_wire(Chat(items), request.messages)
    elif isinstance(request, inference_pb2.GenerateRequest):
        token_ids = request.prompt_token_ids.token_ids
        _attempt("prompt_token_ids", _TOKEN_IDS, items, lambda: token_ids.extend(items))
    else:
        raise InvalidRequestError("prompt", "expected text or messages, got token ids")


def _chat_to_wire(chat: Chat, message: inference_pb2.ChatMessages) -> None:
    for one in map(_message_of, chat.messages):
        _message_to_wire(one, message.messages.add())
    message.SetInParent()
    _set(message, "tools", json_text("tools", chat.tools))
    _set(message, "template_kwargs", json_text("template_kwargs", chat.template_kwargs))
    if chat.add_generation_prompt is not None:
        _set(message, "add_generation_prompt", chat.add_generation_prompt)
    _set(message, "continue_final_message", chat.continue_final_message)


def _message_of(item: Message | Mapping[str, Any]) -> Message:
    """The message of a table. Raises InvalidRequestError for keys that a message does not have."""
    if isinstance(item, Message):
        return item
    has_both = "role" in item and not item.keys().isdisjoint({"content", "tool_calls"})
    if not has_both or not item.keys() <= _MESSAGE_KEYS:
        keys = ", ".join(map(str, item)) or "nothing"
        raise InvalidRequestError("messages", f"a message has a role and a content, got {keys}")
    return message_of(item)


def _message_to_wire(message: Message, into: inference_pb2.ChatMessage) -> None:
    _set(into, "role", message.role, field="messages")
    _set(into, "content", text_of_content(message.content), field="messages")
    for name in ("tool_call_id", "name", "reasoning_content"):
        _set(into, name, getattr(message, name), field="messages")
    for call in message.tool_calls:
        added = into.tool_calls.add()
        for name in ("id", "name", "arguments"):
            _set(added, name, getattr(call, name), field="messages")


def _chat_from_wire(message: inference_pb2.ChatMessages) -> Chat:
    return Chat(
        messages=tuple(
            Message(
                one.role,
                one.content,
                tuple(ToolCall(call.id, call.name, call.arguments) for call in one.tool_calls),
                one.tool_call_id,
                one.name,
                one.reasoning_content,
            )
            for one in message.messages
        ),
        tools=message.tools,
        template_kwargs=message.template_kwargs,
        add_generation_prompt=(
            message.add_generation_prompt if message.HasField("add_generation_prompt") else None
        ),
        continue_final_message=message.continue_final_message,
    )


def _input_from_wire(request: inference_pb2.GenerateRequest) -> GenerateInput:
    match request.WhichOneof("input"):
        case "prompt":
            return request.prompt
        case "prompt_token_ids":
            return tuple(request.prompt_token_ids.token_ids)
        case "messages":
            return _chat_from_wire(request.messages)
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
            counts = _values_of(event.stats)
            counts["speculation"] = _speculation_to_wire(event.stats.speculation)
            response.finished.stats.CopyFrom(inference_pb2.RequestStats(**counts))


def fill_logprobs(message: types_pb2.TokenLogprobs, one: TokenLogprobs) -> None:
    """Write log probabilities into an empty message."""
    if one.logprob is not None:
        message.logprob = one.logprob
        message.rank = one.rank
        message.top_ids.extend(one.top_ids)
        message.top_logprobs.extend(one.top_logprobs)
    message.token = one.token
    message.top_tokens.extend(one.top_tokens)


def logprobs_from_wire(messages: Iterable[types_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    """The plain values of messages."""
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
        """Whether each sample has finished."""
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
                )
            case "finished":
                self._open.remove(sample)
                reason = _REASON_NAMES.get(response.finished.reason, "stop")
                counts = response.finished.stats
                speculation = _read(SpeculationStats, counts.speculation)
                stats = _read(RequestStats, counts, speculation=speculation)
                return Finished(reason, stats, sample)
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
        tool_format=description.tool_format,
        reasoning_format=description.reasoning_format,
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
        tool_format=response.tool_format,
        reasoning_format=response.reasoning_format,
    )


def topology_to_wire(topology: Topology) -> inference_pb2.DescribeTopologyResponse:
    """The message of a deployment's layout."""
    default = _values_of(topology.default_speculation)
    default["stopping"] = _STOPPINGS[default["stopping"]]
    return inference_pb2.DescribeTopologyResponse(
        version=topology.version,
        target_groups=[
            inference_pb2.TargetGroup(shards=map(_topology_worker_to_wire, shards))
            for shards in topology.target_groups
        ],
        drafters=map(_topology_worker_to_wire, topology.drafters),
        rules=topology.rules,
        policies=topology.policies,
        default_speculation=inference_pb2.DefaultSpeculation(**default),
    )


def _topology_worker_to_wire(worker: TopologyWorker) -> inference_pb2.TopologyWorker:
    return inference_pb2.TopologyWorker(**_values_of(worker))


def topology_from_wire(response: inference_pb2.DescribeTopologyResponse) -> Topology:
    """A deployment's layout, from a message."""
    default = response.default_speculation
    stopping = stopping_from_wire(default.stopping).value
    return _read(
        Topology,
        response,
        target_groups=tuple(
            tuple(_read(TopologyWorker, shard) for shard in group.shards)
            for group in response.target_groups
        ),
        drafters=tuple(_read(TopologyWorker, drafter) for drafter in response.drafters),
        default_speculation=_read(DefaultSpeculation, default, stopping=stopping),
    )


# Tokens of a text


def tokenize_to_wire(
    given: CallerInput, *, add_special_tokens: bool | None, return_token_strings: bool
) -> inference_pb2.TokenizeRequest:
    """The message of a text or chat. Raises InvalidRequestError, which names the field."""
    request = inference_pb2.TokenizeRequest()
    _input_to_wire(given, request)
    if add_special_tokens is not None:
        _set(request, "add_special_tokens", add_special_tokens)
    _set(request, "return_token_strings", return_token_strings)
    _check_input_limits(request)
    return request


def tokenize_input_from_wire(request: inference_pb2.TokenizeRequest) -> str | Chat:
    """The text or chat of a message. Raises InvalidRequestError, which names the field."""
    _check_input_limits(request)
    match request.WhichOneof("input"):
        case "prompt":
            return request.prompt
        case "messages":
            return _chat_from_wire(request.messages)
        case _:
            raise InvalidRequestError("input", "expected a prompt or messages, got neither")


def tokens_to_wire(tokens: Tokens) -> inference_pb2.TokenizeResponse:
    """The message of a text's tokens."""
    return inference_pb2.TokenizeResponse(**_values_of(tokens))


def tokens_from_wire(response: inference_pb2.TokenizeResponse) -> Tokens:
    """A text's tokens, from a message."""
    return _read(Tokens, response)


def detokenize_to_wire(token_ids: Iterable[int]) -> inference_pb2.DetokenizeRequest:
    """The message of token ids. Raises InvalidRequestError."""
    request = inference_pb2.DetokenizeRequest()
    _attempt("token_ids", _TOKEN_IDS, token_ids, lambda: request.token_ids.extend(token_ids))
    detokenize_from_wire(request)
    return request


def detokenize_from_wire(request: inference_pb2.DetokenizeRequest) -> tuple[int, ...]:
    """The token ids of a message. Raises InvalidRequestError if there are too many."""
    num_tokens = len(request.token_ids)
    check_count("token_ids", num_tokens, MAX_SEQUENCE_TOKENS, "tokens", PromptTooLongError)
    return tuple(request.token_ids)


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

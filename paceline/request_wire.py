"""Between the wire of a request (inference.proto) and plain values (paceline.generation)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from paceline.convert import rule_to_wire, stopping_to_wire
from paceline.errors import InvalidRequestError, PromptTooLongError
from paceline.generation import (
    CallerInput,
    GenerateInput,
    GenerateOptions,
    Message,
    text_of_content,
)
from paceline.rules import (
    MAX_LOGIT_BIAS,
    MAX_MESSAGES,
    MAX_NAME_LENGTH,
    MAX_PROMPT_BYTES,
    MAX_SEQUENCE_TOKENS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    Rule,
    Stopping,
)
from paceline.v1 import inference_pb2

_SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
)
# Enum numbers have a type of their own in the stubs for each use; Any stands for all of them.
POLICIES: dict[str, Any] = {
    "off": inference_pb2.LOOKAHEAD_POLICY_OFF,
    "lockstep": inference_pb2.LOOKAHEAD_POLICY_LOCKSTEP,
    "chain": inference_pb2.LOOKAHEAD_POLICY_CHAIN,
    "pearl": inference_pb2.LOOKAHEAD_POLICY_PEARL,
    "fanout": inference_pb2.LOOKAHEAD_POLICY_FANOUT,
    "spread": inference_pb2.LOOKAHEAD_POLICY_SPREAD,
    "replicas": inference_pb2.LOOKAHEAD_POLICY_REPLICAS,
    "auto": inference_pb2.LOOKAHEAD_POLICY_AUTO,
}
POLICY_NAMES: dict[int, str] = {number: name for name, number in POLICIES.items()}
_EXPECTED = {
    FieldDescriptor.CPPTYPE_UINT32: f"an integer from 0 to {2**32 - 1}",
    FieldDescriptor.CPPTYPE_UINT64: f"an integer from 0 to {2**64 - 1}",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_BOOL: "True or False",
    FieldDescriptor.CPPTYPE_STRING: "text of valid Unicode",
}
_TOKEN_IDS = f"a list of token ids, each an integer from 0 to {2**32 - 1}"
_BIAS = "a table from token ids to numbers"
_SHOWN = 200
"""Characters of a wrong value in the error that it causes."""
_RULES: dict[str, Any] = {rule.value: rule_to_wire(rule) for rule in Rule}
_RULE_NAMES: dict[int, str] = {number: name for name, number in _RULES.items()}
_STOPPINGS: dict[str, Any] = {one.value: stopping_to_wire(one) for one in Stopping}
_STOPPING_NAMES: dict[int, str] = {number: name for name, number in _STOPPINGS.items()}


def request_to_wire(
    generate_input: CallerInput, options: GenerateOptions
) -> inference_pb2.GenerateRequest:
    """The message of a request.

    Raises InvalidRequestError naming the field when a value cannot be told on the wire at all, or
    is beyond a limit.
    """
    request = inference_pb2.GenerateRequest()
    _input_to_wire(generate_input, request)
    for name in _SAMPLING_FIELDS:
        _set(request.sampling, name, getattr(options, name))
    bias = options.logit_bias
    _attempt("logit_bias", _BIAS, bias, lambda: request.sampling.logit_bias.update(bias))
    for name in (
        "ignore_eos",
        "request_id",
        "seed",
        "max_tokens",
        "window",
        "branches",
        "drafter",
        "merge",
        "tenant",
    ):
        _set(request, name, getattr(options, name))
    if isinstance(options.stop, str):
        raise InvalidRequestError("stop", "expected a list of strings, got a string; put it in one")
    stop, token_ids = options.stop, options.stop_token_ids
    _attempt("stop", "a list of strings", stop, lambda: request.stop.extend(stop))
    _attempt(
        "stop_token_ids", _TOKEN_IDS, token_ids, lambda: request.stop_token_ids.extend(token_ids)
    )
    if options.policy is not None:
        request.policy = _look_up(POLICIES, options.policy, "policy")
    if options.rule is not None:
        request.rule = _look_up(_RULES, options.rule, "rule")
    if options.stopping is not None:
        request.stopping = _look_up(_STOPPINGS, options.stopping, "stopping")
    _check_limits(request)
    return request


def request_from_wire(
    request: inference_pb2.GenerateRequest,
) -> tuple[GenerateInput, GenerateOptions]:
    """Input and options of a message.

    Raises InvalidRequestError for a missing input, an unknown enum and whatever is beyond a limit.
    """
    _check_limits(request)

    def given(message: Any, name: str) -> Any:
        return getattr(message, name) if message.HasField(name) else None

    sampling = request.sampling
    options = GenerateOptions(
        **{name: given(sampling, name) for name in _SAMPLING_FIELDS},
        logit_bias=dict(sampling.logit_bias),
        seed=given(request, "seed"),
        max_tokens=given(request, "max_tokens"),
        stop=tuple(request.stop),
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        policy=_name_of(POLICY_NAMES, request.policy, "policy"),
        rule=_name_of(_RULE_NAMES, request.rule, "rule"),
        window=given(request, "window"),
        stopping=_name_of(_STOPPING_NAMES, request.stopping, "stopping"),
        branches=given(request, "branches"),
        drafter=request.drafter or None,
        merge=given(request, "merge"),
        tenant=request.tenant or None,
        request_id=request.request_id or None,
    )
    return _input_from_wire(request), options


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
    """Raises InvalidRequestError for a table with other keys than those that count here."""
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


def _check_limits(request: inference_pb2.GenerateRequest) -> None:
    """Raise InvalidRequestError naming the field of which a request holds too much.

    A request within these limits fits into one message. Both ends check: a client before it sends,
    a server before it copies or tokenizes anything.
    """
    bias, token_ids = request.sampling.logit_bias, request.prompt_token_ids.token_ids
    _check_count("logit_bias", len(bias), MAX_LOGIT_BIAS, "entries")
    _check_count("stop_token_ids", len(request.stop_token_ids), MAX_STOP_TOKENS, "tokens")
    _check_count("stop", len(request.stop), MAX_STOP_STRINGS, "strings")
    longest = max(map(len, request.stop), default=0)
    _check_count("stop", longest, MAX_STOP_LENGTH, "characters in each string")
    for field in ("request_id", "tenant", "drafter"):
        _check_count(field, len(getattr(request, field)), MAX_NAME_LENGTH, "characters")
    kind = request.WhichOneof("input") or "input"
    if kind == "messages":
        _check_count(kind, len(request.messages.messages), MAX_MESSAGES, "messages")
    texts = [request.prompt]
    for message in request.messages.messages:
        texts += (message.role, message.content)
    size = sum(len(text.encode()) for text in texts)
    _check_count(kind, size, MAX_PROMPT_BYTES, "bytes of text", PromptTooLongError)
    _check_count(kind, len(token_ids), MAX_SEQUENCE_TOKENS, "tokens", PromptTooLongError)


def _check_count(
    field: str,
    count: int,
    most: int,
    of: str,
    error: type[InvalidRequestError] = InvalidRequestError,
) -> None:
    if count > most:
        raise error(field, f"expected at most {most:,} {of}, got {count:,}")


def _set(message: Any, name: str, value: object, *, field: str | None = None) -> None:
    if value is None:
        return
    expected = _EXPECTED[message.DESCRIPTOR.fields_by_name[name].cpp_type]
    _attempt(field or name, expected, value, lambda: setattr(message, name, value))


def _attempt(field: str, expected: str, value: object, assign: Callable[[], None]) -> None:
    """Let protobuf check type and range of a value."""
    try:
        assign()
    except (TypeError, ValueError, AttributeError) as error:
        got = repr(value)
        shown = got if len(got) <= _SHOWN else f"{got[:_SHOWN]}... ({error})"
        raise InvalidRequestError(field, f"expected {expected}, got {shown}") from error


def _look_up(numbers: dict[str, Any], name: str, field: str) -> Any:
    if not isinstance(name, str) or name not in numbers:
        raise InvalidRequestError(field, f"expected one of {', '.join(numbers)}, got {name!r}")
    return numbers[name]


def _name_of(names: dict[int, str], number: int, field: str) -> str | None:
    if number == 0:
        return None
    if number not in names:
        raise InvalidRequestError(
            field, f"expected one of {', '.join(names.values())}, got the unknown number {number}"
        )
    return names[number]

"""A caller's requests as messages (inference.proto): to generate, to tokenize and to detokenize."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

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
from paceline.errors import InvalidRequestError, PromptTooLongError
from paceline.generation import CallerInput, GenerateInput
from paceline.limits import (
    MAX_MESSAGES,
    MAX_PROMPT_BYTES,
    MAX_SEQUENCE_TOKENS,
    MAX_TEMPLATE_KWARGS_BYTES,
    MAX_TOOLS_BYTES,
)
from paceline.options import OPTION_NAMES, GenerateOptions, check_count, check_option
from paceline.sampling import SamplingParams
from paceline.structure import Structure
from paceline.v1 import inference_pb2
from paceline.wire.fields import attempt, plain, read_fields, set_field
from paceline.wire.sequences import (
    STOPPINGS,
    stopping_from_wire,
    structure_from_wire,
    structure_to_wire,
)

_NUMBERS = (
    FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64,
    FieldDescriptor.CPPTYPE_FLOAT,
)
_TOKEN_IDS = f"a list of token ids, each an integer from 0 to {2**32 - 1}"
_EXPECTED_OF_MANY = {
    "logit_bias": "a table from token ids to numbers",
    "stop": "a list of strings",
    "bad_words": "a list of strings",
    "stop_token_ids": _TOKEN_IDS,
    "resume": _TOKEN_IDS,
}
_MESSAGE_KEYS = {*Message.__dataclass_fields__, "reasoning", "refusal"}
"""What a message may have that came as a table, such as one of an answer."""


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
    if name == "stopping":
        if not isinstance(value, str) or value not in STOPPINGS:
            expected = ", ".join(STOPPINGS)
            raise InvalidRequestError(name, f"expected one of {expected}, got {value!r}")
        request.stopping = STOPPINGS[value]
    elif name == "structure":
        if not isinstance(value, Structure):
            raise InvalidRequestError(name, f"expected a Structure, got {value!r:.200}")
        attempt(name, "text of valid Unicode", value, lambda: _set_structure(request, value))
    elif name in ("stop", "bad_words") and isinstance(value, str):
        raise InvalidRequestError(name, "expected a list of strings, got a string; put it in one")
    elif name == "resume_samples":
        attempt(
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
        attempt(name, _EXPECTED_OF_MANY[name], value, lambda: add(value))
    else:
        kind = message.DESCRIPTOR.fields_by_name[name].cpp_type
        if kind in _NUMBERS and isinstance(value, int | float) and not isinstance(value, bool):
            check_option(name, value)  # Its range says more than that of the field's type.
        set_field(message, name, value)


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
    options: dict[str, Any] = {name: plain(value) for name, value in _given_options(request)}
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
            if name == "stopping":
                value = stopping_from_wire(value).value
            elif name == "structure":
                value = structure_from_wire(value)
            elif name == "resume_samples":
                value = tuple(tuple(one.token_ids) for one in value)
            yield name, value


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


# The input: a text, token ids or a chat


def _input_to_wire(
    generate_input: CallerInput,
    request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest,
) -> None:
    if isinstance(generate_input, str):
        set_field(request, "prompt", generate_input)
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
        attempt("prompt_token_ids", _TOKEN_IDS, items, lambda: token_ids.extend(items))
    else:
        raise InvalidRequestError("prompt", "expected text or messages, got token ids")


def _chat_to_wire(chat: Chat, message: inference_pb2.ChatMessages) -> None:
    for one in map(_message_of, chat.messages):
        _message_to_wire(one, message.messages.add())
    message.SetInParent()
    set_field(message, "tools", json_text("tools", chat.tools))
    set_field(message, "template_kwargs", json_text("template_kwargs", chat.template_kwargs))
    if chat.add_generation_prompt is not None:
        set_field(message, "add_generation_prompt", chat.add_generation_prompt)
    set_field(message, "continue_final_message", chat.continue_final_message)


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
    set_field(into, "role", message.role, field="messages")
    set_field(into, "content", text_of_content(message.content), field="messages")
    for name in ("tool_call_id", "name", "reasoning_content"):
        set_field(into, name, getattr(message, name), field="messages")
    for call in message.tool_calls:
        added = into.tool_calls.add()
        for name in ("id", "name", "arguments"):
            set_field(added, name, getattr(call, name), field="messages")


def _chat_from_wire(message: inference_pb2.ChatMessages) -> Chat:
    messages = []
    for one in message.messages:
        calls = tuple(read_fields(ToolCall, call) for call in one.tool_calls)
        messages.append(read_fields(Message, one, tool_calls=calls))
    return read_fields(Chat, message, messages=tuple(messages))


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


# Tokens of a text


def tokenize_to_wire(
    given: CallerInput, *, add_special_tokens: bool | None, return_token_strings: bool
) -> inference_pb2.TokenizeRequest:
    """The message of a text or chat. Raises InvalidRequestError, which names the field."""
    request = inference_pb2.TokenizeRequest()
    _input_to_wire(given, request)
    if add_special_tokens is not None:
        set_field(request, "add_special_tokens", add_special_tokens)
    set_field(request, "return_token_strings", return_token_strings)
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


def detokenize_to_wire(token_ids: Iterable[int]) -> inference_pb2.DetokenizeRequest:
    """The message of token ids. Raises InvalidRequestError."""
    request = inference_pb2.DetokenizeRequest()
    attempt("token_ids", _TOKEN_IDS, token_ids, lambda: request.token_ids.extend(token_ids))
    detokenize_from_wire(request)
    return request


def detokenize_from_wire(request: inference_pb2.DetokenizeRequest) -> tuple[int, ...]:
    """The token ids of a message. Raises InvalidRequestError if there are too many."""
    num_tokens = len(request.token_ids)
    check_count("token_ids", num_tokens, MAX_SEQUENCE_TOKENS, "tokens", PromptTooLongError)
    return tuple(request.token_ids)

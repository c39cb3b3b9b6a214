"""Chats as plain frozen values, and reading them from tables as OpenAI's clients write them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from paceline.errors import InvalidRequestError
from paceline.limits import MAX_JSON_DEPTH, MAX_TOOLS


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function by an assistant. `arguments`: JSON text, an object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat. `role` is "system", "user", "assistant" or "tool".

    `tool_calls` and `reasoning_content` are an assistant's; `tool_call_id` says which call a tool
    answers. "" and () stand for nothing.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning_content: str = ""


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat, and how the checkpoint's template renders it.

    `tools`: the functions that the answer may call, as OpenAI's `tools`, or the JSON text of such a
    list. `template_kwargs`: more variables of the template, or the JSON text of them.
    `add_generation_prompt`: whether the prompt ends with what opens an answer; None: it does,
    unless `continue_final_message` leaves the last message open for the answer to continue it.
    """

    messages: Sequence[Message | Mapping[str, object]]
    tools: str | Sequence[Mapping[str, Any]] = ""
    template_kwargs: str | Mapping[str, Any] = ""
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False


def texts_of(message: Any) -> list[str]:
    """All texts of a Message, or of one on the wire, for its size."""
    texts = [message.role, message.content]
    texts += [message.tool_call_id, message.name, message.reasoning_content]
    for call in message.tool_calls:
        texts += [call.id, call.name, call.arguments]
    return texts


def text_of_content(content: object) -> str:
    """The text of a message's content as OpenAI's clients write it: a text or a list of text parts.

    Raises InvalidRequestError for a part of another type.
    """
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list | tuple) else []
    if not parts:
        came = "an empty list" if parts is content else type(content).__name__
        raise InvalidRequestError(
            "messages", f"expected a content of text or of text parts, got {came}"
        )
    return "".join(map(_text_of_part, parts))


def _text_of_part(part: object) -> str:
    table = part if isinstance(part, Mapping) else {}
    kind, text = table.get("type"), table.get("text")
    if kind == "refusal":
        text = table.get("refusal")
    elif kind != "text":
        came = f"one of type {kind!r}" if isinstance(kind, str) else type(part).__name__
        raise InvalidRequestError("messages", f"expected content parts of type 'text', got {came}")
    if not isinstance(text, str):
        came = type(text).__name__
        raise InvalidRequestError("messages", f"expected a text part with a text, got {came}")
    return text


def message_of(table: Mapping[str, Any]) -> Message:
    """The message of a table as OpenAI's clients write it. Fields not known here are ignored.

    Raises InvalidRequestError, which names `messages`.
    """
    role, content = table.get("role"), table.get("content")
    _expect(isinstance(role, str), "a role that is a string", role)
    calls = table.get("tool_calls")
    _expect(calls is None or isinstance(calls, list | tuple), "tool_calls that are a list", calls)
    if content is None and role == "assistant":  # Why OpenAI's model did not answer.
        content = table.get("refusal")
    if content is None:
        _expect(bool(calls), "a content of text or of text parts", content)
        content = ""
    reasoning = table.get("reasoning_content")
    texts = {
        "tool_call_id": table.get("tool_call_id"),
        "name": table.get("name"),
        "reasoning_content": table.get("reasoning") if reasoning is None else reasoning,
    }
    for name, value in texts.items():
        _expect(value is None or isinstance(value, str), f"{name} to be a string", value)
    return Message(
        role=str(role),
        content=text_of_content(content),
        tool_calls=tuple(map(_call_of, calls or ())),
        **{name: value or "" for name, value in texts.items()},
    )


def _call_of(item: object) -> ToolCall:
    call = item if isinstance(item, Mapping) else {}
    function = call.get("function")
    _expect(isinstance(function, Mapping), "tool calls with a function", function)
    assert isinstance(function, Mapping)
    found = {
        "id": call.get("id", ""),
        "name": function.get("name"),
        "arguments": function.get("arguments"),
    }
    for name, value in found.items():
        _expect(isinstance(value, str), f"the {name} of a tool call to be a string", value)
    return ToolCall(**found)


def _expect(holds: bool, expected: str, value: object) -> None:
    if not holds:
        came = "null" if value is None else type(value).__name__
        raise InvalidRequestError("messages", f"expected {expected}, got {came}")


# JSON


def json_text(field: str, value: object) -> str:
    """The JSON text of a value; a text is taken as it is. Raises InvalidRequestError."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping | list | tuple) and not value:
        return ""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(field, f"expected what JSON can write: {error}") from None


def json_value(field: str, text: str) -> Any:
    """The value of JSON text. Raises InvalidRequestError, also if it is nested too deeply."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise _too_deep(field) from None
    except ValueError as error:
        raise InvalidRequestError(field, f"expected JSON: {error}") from None
    level: list[Any] = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return value
    if any(isinstance(one, dict | list) for one in level):
        raise _too_deep(field)
    return value


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


def _too_deep(field: str) -> InvalidRequestError:
    return InvalidRequestError(field, f"expected JSON nested at most {MAX_JSON_DEPTH} deep")


def tools_of(text: str) -> list[dict[str, Any]]:
    """The tools in JSON text. Raises InvalidRequestError, which names `tools`."""
    tools = json_value("tools", text) if text else []
    if not isinstance(tools, list) or not all(isinstance(one, dict) for one in tools):
        raise InvalidRequestError("tools", "expected a list of objects")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError("tools", f"expected at most {MAX_TOOLS} tools, got {len(tools)}")
    return tools


def object_of(field: str, text: str) -> dict[str, Any]:
    """The object in JSON text; "" is an empty one. Raises InvalidRequestError."""
    value = json_value(field, text) if text else {}
    if not isinstance(value, dict):
        raise InvalidRequestError(field, "expected a JSON object")
    return value

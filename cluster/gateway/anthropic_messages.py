"""Anthropic's `/v1/messages`: its requests as chats, and answers to chats in its form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from cluster.gateway.content_blocks import (
    Block,
    BlockRequest,
    Json,
    chat_as,
    list_in,
    refusal,
    renamed,
    table_in,
    tables_in,
    text_in,
)
from cluster.gateway.errors import HttpError
from cluster.gateway.openai_answers import Ended
from cluster.gateway.requests import FIELDS, Body, read_chat
from cluster.gateway.structure import read_tools
from cluster.gateway.tokens import TokenizeRequest

_SAME = (*(FIELDS.keys() - {"stop", "max_completion_tokens"}), "speculation")
"""Fields that mean the same in a chat. Anthropic has a few of them."""
_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "structure": "output_config.format",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
"""Fields of a chat that have other names here."""
_OWN_HEADER = "x-anthropic-billing-header:"
"""Begins a block that Claude Code puts before its instructions. It differs from request to request,
so no prompt would begin like the one before."""
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def messages_request(body: Body) -> BlockRequest:
    """The request in a body of /v1/messages. Raises InvalidRequestError, which names the field."""
    max_tokens = body.get("max_tokens")
    if max_tokens is None:
        raise refusal("max_tokens", "an integer of at least 1", max_tokens)
    chat = chat_as(_chat_body(body), _NAMES)
    return BlockRequest(
        chat, "msg_", lambda answer_id, model: _MessageWriter(answer_id, model, max_tokens)
    )


def count_request(body: Body) -> TokenizeRequest:
    """The request in a body of /v1/messages/count_tokens. Raises InvalidRequestError."""
    with renamed(_NAMES):
        chat = _chat_body(body)
        given = read_chat(chat, read_tools(chat))
    model = body.get("model")
    name = None if model is None else text_in("model", model)
    return TokenizeRequest(name, given, only_count=True)


def _chat_body(body: Body) -> Json:
    chat: Json = {name: body.get(name) for name in (*_SAME, "model", "stream")}
    chat["stop"] = body.get("stop_sequences")
    chat |= _tools(body)
    turns = _Turns()
    if (system := body.get("system")) is not None:
        turns.add_system("system", system)
    messages = list_in("messages", body.get("messages"), "a list of messages")
    if not messages:
        raise refusal("messages", "at least one message", "none")
    for number, message in enumerate(messages):
        turns.add(f"messages[{number}]", message)
    chat["messages"] = turns.messages
    last = turns.messages[-1] if turns.messages else {}
    if last.get("role") == "assistant" and not last.get("tool_calls"):
        chat["continue_final_message"] = True
    config = body.get("output_config")
    if config is not None and table_in("output_config", config).get("format") is not None:
        wanted = table_in("output_config.format", config["format"])
        if wanted.get("type") != "json_schema":
            raise refusal("output_config.format.type", "json_schema", wanted.get("type"))
        schema = {"name": "output", "schema": wanted.get("schema")}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    kwargs = dict(table_in("chat_template_kwargs", body.get("chat_template_kwargs") or {}))
    if (thinking := body.get("thinking")) is not None:
        kind = text_in("thinking.type", table_in("thinking", thinking).get("type"))
        kwargs = {"enable_thinking": kind != "disabled", **kwargs}
    chat["chat_template_kwargs"] = kwargs
    return chat


def _tools(body: Body) -> Json:
    tools = []
    given = body.get("tools")
    for where, tool in tables_in("tools", given or [], "a list of tools"):
        if tool.get("type") not in (None, "custom"):
            raise refusal(
                f"{where}.type", "custom (tools of Anthropic's servers are not here)", tool["type"]
            )
        schema = table_in(f"{where}.input_schema", tool.get("input_schema"))
        function = {"name": tool.get("name"), "parameters": schema}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        tools.append({"type": "function", "function": function})
    fields: Json = {"tools": tools or None}
    if (choice := body.get("tool_choice")) is None:
        return fields
    kind = table_in("tool_choice", choice).get("type")
    match kind:
        case "auto" | "none":
            fields["tool_choice"] = kind
        case "any":
            fields["tool_choice"] = "required"
        case "tool":
            name = text_in("tool_choice.name", choice.get("name"))
            fields["tool_choice"] = {"type": "function", "function": {"name": name}}
        case _:
            raise refusal("tool_choice.type", "auto, any, tool or none", kind)
    if (only_one := choice.get("disable_parallel_tool_use")) is not None:
        if not isinstance(only_one, bool):
            raise refusal(_NAMES["parallel_tool_calls"], "true or false", only_one)
        fields["parallel_tool_calls"] = not only_one
    return fields


class _Turns:
    """Turns Anthropic's messages into a chat's, those of one role in a row into one."""

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self._functions: dict[str, str] = {}
        """By the id of a call, what it called."""

    def add_system(self, where: str, content: object) -> None:
        texts = [content] if isinstance(content, str) else _texts(where, content)
        kept = [text for text in texts if not text.startswith(_OWN_HEADER)]
        self._say("system", "\n".join(kept))

    def add(self, where: str, item: object) -> None:
        message = table_in(where, item)
        role, content = message.get("role"), message.get("content")
        where = f"{where}.content"
        if role == "system":
            self.add_system(where, content)
            return
        if role not in ("user", "assistant"):
            raise refusal(where.removesuffix("content") + "role", "user or assistant", role)
        if isinstance(content, str):
            self._say(role, content)
            return
        blocks = list_in(where, content, "a text or a list of blocks")
        if not blocks:
            self._say(role, "")
        for place, block in tables_in(where, blocks, "a list of blocks"):
            add = self._add_of_user if role == "user" else self._add_of_assistant
            add(place, block)

    def _add_of_user(self, where: str, block: Mapping[str, Any]) -> None:
        match block.get("type"):
            case "text":
                self._say("user", text_in(f"{where}.text", block.get("text")))
            case "tool_result":
                call = text_in(f"{where}.tool_use_id", block.get("tool_use_id"))
                content = block.get("content")
                if not isinstance(content, str):
                    content = "\n".join(_texts(f"{where}.content", content or []))
                answered: Json = {"role": "tool", "tool_call_id": call, "content": content}
                if call in self._functions:
                    answered["name"] = self._functions[call]
                self.messages.append(answered)
            case kind:
                raise refusal(f"{where}.type", "text or tool_result", kind)

    def _add_of_assistant(self, where: str, block: Mapping[str, Any]) -> None:
        match block.get("type"):
            case "text":
                self._say("assistant", text_in(f"{where}.text", block.get("text")))
            case "thinking":
                thought = text_in(f"{where}.thinking", block.get("thinking"))
                turn = self._turn("assistant")
                turn["reasoning_content"] = turn.get("reasoning_content", "") + thought
            case "redacted_thinking":  # Nobody here can read it.
                self._turn("assistant")
            case "tool_use":
                call_id = text_in(f"{where}.id", block.get("id"))
                name = text_in(f"{where}.name", block.get("name"))
                given = table_in(f"{where}.input", block.get("input"))
                self._functions[call_id] = name
                function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
                call = {"id": call_id, "type": "function", "function": function}
                self._turn("assistant").setdefault("tool_calls", []).append(call)
            case kind:
                raise refusal(f"{where}.type", "text, thinking or tool_use", kind)

    def _say(self, role: str, text: str) -> None:
        """More text of a role. That of users and of instructions begins a line of its own."""
        turn = self._turn(role)
        between = "\n" if turn["content"] and role != "assistant" else ""
        turn["content"] += between + text

    def _turn(self, role: str) -> Json:
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": ""})
        return self.messages[-1]


def _texts(where: str, content: object) -> list[str]:
    texts = []
    for place, block in tables_in(where, content, "a text or a list of text blocks"):
        if block.get("type") != "text":
            raise refusal(f"{place}.type", "text", block.get("type"))
        texts.append(text_in(f"{place}.text", block.get("text")))
    return texts


@dataclass(slots=True)
class _MessageWriter:
    """Writes an answer as a message. `max_tokens`: what its caller allowed."""

    answer_id: str
    model: str
    max_tokens: int
    message: Json = field(default_factory=dict)

    def begin(self, num_prompt_tokens: int) -> list[Json]:
        self.message = {
            "id": self.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": num_prompt_tokens, "output_tokens": 0},
        }
        return [{"type": "message_start", "message": self.message}]

    def open(self, block: Block) -> list[Json]:
        begun = self._content(block)
        return [{"type": "content_block_start", "index": block.number, "content_block": begun}]

    def more(self, block: Block, text: str, logprobs: list[Json]) -> list[Json]:
        kind, name = {
            "text": ("text_delta", "text"),
            "reasoning": ("thinking_delta", "thinking"),
            "call": ("input_json_delta", "partial_json"),
        }[block.kind]
        delta = {"type": kind, name: text}
        return [{"type": "content_block_delta", "index": block.number, "delta": delta}]

    def close(self, block: Block, *, is_cut: bool) -> list[Json]:
        return [{"type": "content_block_stop", "index": block.number}]

    def end(self, blocks: Sequence[Block], ended: Ended) -> list[Json]:
        told = {"type": "message_delta", "delta": self._stop(ended), "usage": _usage(ended)}
        return [told, {"type": "message_stop"}]

    def whole(self, blocks: Sequence[Block], ended: Ended) -> Json:
        content = [self._content(block) for block in blocks]
        return {**self.message, "content": content, **self._stop(ended), "usage": _usage(ended)}

    def failed(self, error: HttpError) -> list[Json]:
        return [error.of_anthropic()]

    def _stop(self, ended: Ended) -> Json:
        reason = _STOP_REASONS.get(ended.reason, "end_turn")
        if ended.reason == "length" and ended.num_tokens < self.max_tokens:
            reason = "model_context_window_exceeded"
        if ended.reason == "stop" and ended.stop:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": ended.stop or None}

    def _content(self, block: Block) -> Json:
        match block.kind:
            case "text":
                return {"type": "text", "text": block.text}
            case "reasoning":
                return {"type": "thinking", "thinking": block.text, "signature": ""}
            case "call":
                call_id = f"toolu_{self.answer_id.removeprefix('msg_')[:24]}_{block.call}"
                given = _arguments(block.text)
                return {"type": "tool_use", "id": call_id, "name": block.name, "input": given}


def _usage(ended: Ended) -> Json:
    """The counts. As Anthropic's, `input_tokens` are those that the cache did not have."""
    return {
        "input_tokens": ended.num_prompt_tokens - ended.num_cached_tokens,
        "cache_read_input_tokens": ended.num_cached_tokens,
        "output_tokens": ended.num_tokens,
    }


def _arguments(text: str) -> Json:
    """The arguments of a call, as far as an answer that was cut has them."""
    try:
        given = from_json(text, allow_partial=True)
    except ValueError:
        given = {}
    return given if isinstance(given, dict) else {}

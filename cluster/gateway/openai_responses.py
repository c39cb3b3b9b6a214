"""OpenAI's `/v1/responses`: its requests as chats, and answers to chats in its form.

Nothing is kept of a response, so a caller sends the whole conversation each time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cluster.gateway.content_blocks import (
    Block,
    BlockRequest,
    Json,
    chat_as,
    list_in,
    refusal,
    table_in,
    tables_in,
    text_in,
)
from cluster.gateway.errors import HttpError
from cluster.gateway.openai_answers import Ended
from cluster.gateway.requests import FIELDS, Body, ReadBody
from paceline.errors import InvalidRequestError

_SAME = (
    *(FIELDS.keys() - {"max_tokens", "max_completion_tokens"}),
    *("speculation", "chat_template_kwargs", "parallel_tool_calls", "model", "stream"),
    "top_logprobs",
)
"""Fields that mean the same in a chat. OpenAI has a few of them."""
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "structure": "text.format",
}
"""Fields of a chat that have other names here."""
REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "previous_response_id": (
        (None,),
        "responses are not kept here; send the whole conversation in input",
    ),
    "conversation": (
        (None,),
        "conversations are not kept here; send the whole conversation in input",
    ),
    "background": ((None, False), "is not possible here; use stream"),
    "prompt": ((None,), "prompts are not kept here; send instructions and input"),
    "truncation": ((None, "disabled"), "expected 'disabled'; nothing is left out of input here"),
}
"""Fields that would change the answer and are not possible, with the values that have no effect."""
_LOGPROBS = "message.output_text.logprobs"
_HOSTED = (
    "web_search",
    "web_search_preview",
    "file_search",
    "code_interpreter",
    "image_generation",
)
"""Tools that OpenAI's servers run. They are left out, so the model never asks for one."""


def responses_request(body: Body) -> BlockRequest:
    """The request in a body of /v1/responses. Raises InvalidRequestError, which names the field."""
    for name, (harmless, why) in REFUSED.items():
        if body.get(name) not in harmless:
            raise InvalidRequestError(name, why)
    chat: Json = {name: body.get(name) for name in _SAME}
    included = list_in("include", body.get("include") or [], "a list")
    chat["logprobs"] = _LOGPROBS in included or bool(chat["top_logprobs"])
    chat["max_tokens"] = body.get("max_output_tokens")
    chat |= _tools(body)
    items = _Items()
    if (instructions := body.get("instructions")) is not None:
        items.say("system", text_in("instructions", instructions))
    items.add_all(body.get("input"))
    chat["messages"] = items.messages
    if (text := body.get("text")) is not None and table_in("text", text).get("format") is not None:
        chat["response_format"] = _format(table_in("text.format", text["format"]))
    if (reasoning := body.get("reasoning")) is not None:
        effort = table_in("reasoning", reasoning).get("effort")
        if effort is not None:
            kwargs = table_in("chat_template_kwargs", body.get("chat_template_kwargs") or {})
            chat["chat_template_kwargs"] = {
                "enable_thinking": text_in("reasoning.effort", effort) != "none",
                **kwargs,
            }
    echoed = {name: body.get(name) for name in _ECHOED if body.get(name) is not None}
    writer = partial(_ResponseWriter, echoed=echoed, namespaces=_namespaces(echoed.get("tools")))
    return BlockRequest(chat_as(chat, _NAMES), "resp_", writer, numbers_events=True)


_ECHOED = (
    *("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "reasoning"),
    *("temperature", "text", "tool_choice", "tools", "top_p"),
)
"""Fields of a request that its response repeats."""


def _format(given: Mapping[str, Any]) -> Json:
    kind = given.get("type")
    if kind == "json_schema":
        return {"type": kind, "json_schema": {"schema": given.get("schema")}}
    if kind not in ("text", "json_object"):
        raise refusal("text.format.type", "text, json_object or json_schema", kind)
    return {"type": kind}


def _tools(body: Body) -> Json:
    tools = []
    given = body.get("tools")
    for where, tool in tables_in("tools", given or [], "a list of tools"):
        if tool.get("type") == "namespace":
            space = {"namespace": tool.get("name")}
            within = tables_in(f"{where}.tools", tool.get("tools"), "a list of tools")
            tools += [_function(place, {**one, **space}) for place, one in within]
        elif tool.get("type") not in _HOSTED:
            tools.append(_function(where, tool))
        elif isinstance(body, ReadBody):
            body.left_out.append(where)
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        if choice.get("type") != "function":
            raise refusal("tool_choice.type", "function", choice.get("type"))
        choice = {"type": "function", "function": {"name": _full_name("tool_choice", choice)}}
    if not tools and choice == "auto":  # What OpenAI's clients may send without tools.
        choice = None
    return {"tools": tools or None, "tool_choice": choice}


def _function(where: str, tool: Mapping[str, Any]) -> Json:
    if tool.get("type") != "function":
        raise refusal(f"{where}.type", "function or namespace", tool.get("type"))
    names = ("description", "parameters")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": {"name": _full_name(where, tool), **function}}


def _full_name(where: str, given: Mapping[str, Any]) -> str:
    """The name of a function in a chat: behind that of its namespace, if it has one."""
    name, space = text_in(f"{where}.name", given.get("name")), given.get("namespace")
    return name if space is None else f"{text_in(f'{where}.namespace', space)}.{name}"


def _namespaces(tools: Sequence[Mapping[str, Any]] | None) -> frozenset[str]:
    return frozenset(tool["name"] for tool in tools or () if tool.get("type") == "namespace")


class _Items:
    """Turns the items of an input into a chat's messages.

    The reasoning, text and calls of an assistant in a row are one message.
    """

    def __init__(self) -> None:
        self.messages: list[Json] = []

    def say(self, role: str, text: str) -> None:
        self.messages.append({"role": role, "content": text})

    def add_all(self, given: object) -> None:
        if isinstance(given, str):
            self.say("user", given)
            return
        items = list_in("input", given, "a text or a list of items")
        if not items:
            raise refusal("input", "at least one item", "none")
        for where, item in tables_in("input", items, "a list of items"):
            self._add(where, item)

    def _add(self, where: str, item: Mapping[str, Any]) -> None:
        match item.get("type", "message"):
            case "message":
                role = text_in(f"{where}.role", item.get("role"))
                text = _text(f"{where}.content", item.get("content"))
                if role == "assistant":
                    self._of_assistant()["content"] += text
                else:
                    self.say(role, text)
            case "reasoning":
                texts = _text(f"{where}.content", item.get("content") or [])
                turn = self._of_assistant()
                turn["reasoning_content"] = turn.get("reasoning_content", "") + texts
            case "function_call":
                names = ("call_id", "arguments")
                call_id, given = [text_in(f"{where}.{name}", item.get(name)) for name in names]
                function = {"name": _full_name(where, item), "arguments": given}
                call = {"id": call_id, "type": "function", "function": function}
                self._of_assistant().setdefault("tool_calls", []).append(call)
            case "function_call_output":
                answered = {
                    "role": "tool",
                    "tool_call_id": text_in(f"{where}.call_id", item.get("call_id")),
                    "content": _text(f"{where}.output", item.get("output")),
                }
                self.messages.append(answered)
            case kind:
                expected = "message, reasoning, function_call or function_call_output"
                raise refusal(f"{where}.type", expected, kind)

    def _of_assistant(self) -> Json:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.say("assistant", "")
        return self.messages[-1]


def _text(where: str, content: object) -> str:
    """The text of a content: itself, or that of its parts."""
    if isinstance(content, str):
        return content
    texts = []
    for place, part in tables_in(where, content, "a text or a list of parts"):
        match part.get("type"):
            case "input_text" | "output_text" | "reasoning_text" | "text":
                texts.append(text_in(f"{place}.text", part.get("text")))
            case "refusal":
                texts.append(text_in(f"{place}.refusal", part.get("refusal")))
            case kind:
                raise refusal(f"{place}.type", "input_text or output_text", kind)
    return "".join(texts)


@dataclass(slots=True)
class _ResponseWriter:
    """Writes an answer as a response. `echoed`: fields that it repeats.

    `namespaces`: those of the functions that it may call.
    """

    answer_id: str
    model: str
    echoed: Json
    namespaces: frozenset[str]
    created_at: int = field(default_factory=lambda: int(time.time()))
    is_last_cut: bool = False

    def begin(self, num_prompt_tokens: int) -> list[Json]:
        response = self._response("in_progress", [])
        names = ("response.created", "response.in_progress")
        return [{"type": name, "response": response} for name in names]

    def open(self, block: Block) -> list[Json]:
        item = self._item(block, "in_progress")
        added = {"type": "response.output_item.added", "output_index": block.number, "item": item}
        if block.kind == "call":
            return [added]
        (part,) = item["content"]
        item["content"] = []
        return [added, self._told("content_part.added", block, part=part)]

    def more(self, block: Block, text: str, logprobs: list[Json]) -> list[Json]:
        more: Json = {"logprobs": logprobs} if block.kind == "text" else {}
        return [self._told(f"{_TOLD_AS[block.kind]}.delta", block, delta=text, **more)]

    def close(self, block: Block, *, is_cut: bool) -> list[Json]:
        self.is_last_cut = is_cut
        item = self._item(block, "incomplete" if is_cut else "completed")
        name = f"{_TOLD_AS[block.kind]}.done"
        if block.kind == "call":
            told = [self._told(name, block, arguments=block.text, name=item["name"])]
        else:
            (part,) = item["content"]
            more = {"logprobs": part["logprobs"]} if block.kind == "text" else {}
            told = [
                self._told(name, block, text=block.text, **more),
                self._told("content_part.done", block, part=part),
            ]
        done = {"type": "response.output_item.done", "output_index": block.number, "item": item}
        return [*told, done]

    def end(self, blocks: Sequence[Block], ended: Ended) -> list[Json]:
        response = self.whole(blocks, ended)
        return [{"type": f"response.{response['status']}", "response": response}]

    def whole(self, blocks: Sequence[Block], ended: Ended) -> Json:
        items = [self._item(block, "completed") for block in blocks]
        if items and self.is_last_cut:
            items[-1] |= {"status": "incomplete"}
        is_cut = ended.reason == "length"
        response = self._response("incomplete" if is_cut else "completed", items)
        response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        response["usage"] = {
            "input_tokens": ended.num_prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": ended.num_cached_tokens,
                "cache_write_tokens": 0,  # Its client expects it.
            },
            "output_tokens": ended.num_tokens,
            "output_tokens_details": {"reasoning_tokens": ended.num_reasoning_tokens},
            "total_tokens": ended.num_prompt_tokens + ended.num_tokens,
        }
        return response

    def failed(self, error: HttpError) -> list[Json]:
        told = {"message": error.shown, "code": error.code}
        response = self._response("failed", []) | {"error": told}
        return [{"type": "response.failed", "response": response}]

    def _response(self, status: str, items: list[Json]) -> Json:
        return {
            "id": self.answer_id,
            "object": "response",
            "created_at": self.created_at,
            "status": status,
            "model": self.model,
            "output": items,
            "error": None,
            "incomplete_details": None,
            "usage": None,
            "store": False,
            "previous_response_id": None,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "temperature": None,
            "top_p": None,
            **self.echoed,
        }

    def _item(self, block: Block, status: str) -> Json:
        item: Json = {"id": self._item_id(block), "status": status}
        match block.kind:
            case "text":
                part: Json = {"type": "output_text", "text": block.text, "annotations": []}
                part["logprobs"] = [*block.logprobs]
                return item | {"type": "message", "role": "assistant", "content": [part]}
            case "reasoning":
                part = {"type": "reasoning_text", "text": block.text}
                return item | {"type": "reasoning", "summary": [], "content": [part]}
            case "call":
                call_id = f"call_{self._number}_{block.call}"
                called: Json = {"call_id": call_id, "name": block.name, "arguments": block.text}
                space, _, name = block.name.partition(".")
                if space in self.namespaces:
                    called |= {"name": name, "namespace": space}
                return item | {"type": "function_call", **called}

    @property
    def _number(self) -> str:
        return self.answer_id.removeprefix("resp_")[:24]

    def _item_id(self, block: Block) -> str:
        prefix = {"text": "msg", "reasoning": "rs", "call": "fc"}[block.kind]
        return f"{prefix}_{self._number}_{block.number}"

    def _told(self, name: str, block: Block, /, **more: object) -> Json:
        """An event within an item."""
        place: Json = {"item_id": self._item_id(block), "output_index": block.number}
        if block.kind != "call":
            place["content_index"] = 0
        return {"type": f"response.{name}", **place, **more}


_TOLD_AS = {
    "text": "output_text",
    "reasoning": "reasoning_text",
    "call": "function_call_arguments",
}
"""The names of events by the kind of a block."""

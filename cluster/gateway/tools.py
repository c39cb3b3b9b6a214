"""The tools of a chat request: what of `tools` and `tool_choice` is taken, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.gateway.answer_text import ToolFormat
from paceline.chat import json_text
from paceline.errors import InvalidRequestError
from paceline.limits import MAX_TOOLS, MAX_TOOLS_BYTES
from paceline.options import check_count
from paceline.structure import Structure

_FRAMES: Mapping[ToolFormat, tuple[str, str]] = {
    "hermes": ('<tool_call>\n{{"name": {}, "arguments": ', "}\n</tool_call>"),
    "llama": ('{{"name": {}, "parameters": ', "}"),
}
"""What stands before and after the arguments of a call."""
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Tools:
    """The functions that an answer may call. `text`: the JSON text of the caller's list.

    `most_calls`: calls of an answer; None: any number. `forced`: the JSON schemas of the arguments
    by function, if the answer must be a call of one of them.
    """

    text: str
    names: frozenset[str]
    most_calls: int | None = None
    forced: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def structure(self, tool_format: ToolFormat) -> Structure | None:
        """What an answer must be that is one call; None: any text."""
        if not self.forced:
            return None
        before, after = _FRAMES[tool_format]
        calls = []
        for name, schema in self.forced.items():
            # Without blanks, of which a model could write any number.
            schema = {"type": "object", "x-guidance": {"whitespace_flexible": False}, **schema}
            begin = json.dumps(before.format(json.dumps(name)), ensure_ascii=False)
            end = json.dumps(after, ensure_ascii=False)
            calls.append(f"{begin} %json {json.dumps(schema)} {end}")
        return Structure.grammar("start: " + "\n     | ".join(calls))


def read_tools(body: Mapping[str, Any]) -> Tools | None:
    """The tools of a body; None: the answer may call none. Raises InvalidRequestError."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    parallel = body.get("parallel_tool_calls")
    if parallel is not None and not isinstance(parallel, bool):
        raise InvalidRequestError("parallel_tool_calls", "expected true or false")
    if tools is not None and not isinstance(tools, list):
        raise InvalidRequestError("tools", "expected a list of tools")
    tools = tools or []
    check_count("tools", len(tools), MAX_TOOLS, "tools")
    names = [_name_of(f"tools[{number}]", tool) for number, tool in enumerate(tools)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InvalidRequestError("tools", f"expected different names, got {twice!r} twice")
    forced = _forced(choice, names)
    if not tools or choice == "none":
        return None
    text = json_text("tools", tools)
    check_count("tools", len(text.encode()), MAX_TOOLS_BYTES, "bytes of JSON text")
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    return Tools(
        text,
        frozenset(forced or names),
        most_calls=1 if parallel is False or forced else None,
        forced={name: schemas[name] or {} for name in forced},
    )


def _name_of(where: str, tool: object) -> str:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise InvalidRequestError(where, "expected an object of type 'function'")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequestError(f"{where}.function", "expected an object")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        expected = "expected 1 to 64 letters, digits, dots, hyphens or underscores"
        raise InvalidRequestError(f"{where}.function.name", expected)
    kinds = {"description": (str, "a string"), "parameters": (dict, "a JSON Schema, an object")}
    for part, (kind, expected) in kinds.items():
        value = function.get(part)
        if value is not None and not isinstance(value, kind):
            raise InvalidRequestError(f"{where}.function.{part}", f"expected {expected}")
    return name


def _forced(choice: object, names: list[str]) -> list[str]:
    """The functions of which the answer must call one; none: it may be any text."""
    if choice in (None, "none"):
        return []
    named = None
    if isinstance(choice, dict) and isinstance(function := choice.get("function"), dict):
        named = function.get("name")
        if not isinstance(named, str):
            named = None
    if choice not in ("auto", "required") and named is None:
        expected = "expected 'auto', 'none', 'required' or a function with its name"
        raise InvalidRequestError("tool_choice", expected)
    if not names:
        raise InvalidRequestError("tool_choice", "there are no tools to choose from; send tools")
    if named is not None and named not in names:
        known = ", ".join(names)
        raise InvalidRequestError(
            "tool_choice", f"expected one of {known:.500}; got {named!r:.100}"
        )
    if named is not None:
        return [named]
    return names if choice == "required" else []

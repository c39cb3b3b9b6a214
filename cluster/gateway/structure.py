"""What a body asks an answer to be: its `tools`, OpenAI's `response_format`, or vLLM's fields."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.gateway.answer_text import ToolFormat
from paceline.chat import json_text
from paceline.errors import InvalidRequestError
from paceline.limits import MAX_TOOLS, MAX_TOOLS_BYTES
from paceline.options import check_count
from paceline.structure import Structure
from paceline.text import did_you_mean

_FRAMES: Mapping[ToolFormat, tuple[str, str]] = {
    "hermes": ('<tool_call>\n{{"name": {}, "arguments": ', "}\n</tool_call>"),
    "llama": ('{{"name": {}, "parameters": ', "}"),
}
"""What stands before and after the arguments of a call."""
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)

_OLD_NAMES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "guided_choice": "choice",
}
"""vLLM's older fields, each with the key of `structured_outputs` that replaced it."""


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


# Structures


def structure_of(body: Mapping[str, Any]) -> tuple[Structure, str] | None:
    """The structure and the field that asks for it; None: any text.

    Raises InvalidRequestError, which names the field, also if two fields ask.
    """
    asked: list[tuple[Structure, str]] = []
    if (given := body.get("response_format")) is not None:
        asked += [(one, "response_format") for one in _of_format(given)]
    if (given := body.get("structured_outputs")) is not None:
        asked += _of_outputs(given)
    for name, key in _OLD_NAMES.items():
        if body.get(name) is not None:
            asked.append((_KEYS[key](name, body[name]), name))
    if len(asked) > 1:
        names = " and ".join(name for _, name in asked)
        raise InvalidRequestError(_field(asked[1][1]), f"expected one structure, got {names}")
    return (asked[0][0], _field(asked[0][1])) if asked else None


def _field(name: str) -> str:
    """The field of the body, without a key within it."""
    return name.partition(".")[0]


def _of_format(given: object) -> list[Structure]:
    name = "response_format"
    if not isinstance(given, dict):
        raise InvalidRequestError(name, "expected an object")
    match given.get("type"):
        case "text":
            return []
        case "json_object":
            return [Structure.json_object()]
        case "json_schema":
            inner = given.get("json_schema")
            if not isinstance(inner, dict) or inner.get("schema") is None:
                raise InvalidRequestError(name, "expected a schema in json_schema.schema")
            return [_json(name, inner["schema"])]
        case _:
            raise InvalidRequestError(name, "expected the type text, json_object or json_schema")


def _of_outputs(given: object) -> list[tuple[Structure, str]]:
    name = "structured_outputs"
    if not isinstance(given, dict):
        raise InvalidRequestError(name, "expected an object")
    found = []
    for key, value in given.items():
        if value is None or value is False:
            continue
        if key not in _KEYS:
            hint = did_you_mean(key, _KEYS) if len(key) < 100 else ""
            raise InvalidRequestError(name, f"{key!r:.100} is not supported{hint}")
        found.append((_KEYS[key](name, value), f"{name}.{key}"))
    return found


def _json(name: str, value: object) -> Structure:
    if isinstance(value, str):
        return Structure.json_schema(value)
    if not isinstance(value, dict):
        raise InvalidRequestError(name, "expected a JSON schema: an object, or its text")
    try:
        return Structure.json_schema(json.dumps(value, ensure_ascii=False))
    except RecursionError:
        raise InvalidRequestError(name, "expected a schema that is less deeply nested") from None


def _text(make: Callable[[str], Structure]) -> Callable[[str, object], Structure]:
    def read(name: str, value: object) -> Structure:
        if not isinstance(value, str):
            raise InvalidRequestError(name, "expected text")
        return make(value)

    return read


def _choice(name: str, value: object) -> Structure:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise InvalidRequestError(name, "expected a list of texts to choose from")
    return Structure.choice(value)


def _json_object(name: str, value: object) -> Structure:
    if value is not True:
        raise InvalidRequestError(name, "expected true or false in json_object")
    return Structure.json_object()


_KEYS: Mapping[str, Callable[[str, object], Structure]] = {
    "json": _json,
    "regex": _text(Structure.regex),
    "grammar": _text(Structure.grammar),
    "choice": _choice,
    "json_object": _json_object,
}
"""The keys of `structured_outputs`."""

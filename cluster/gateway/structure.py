"""The structure that a body asks for: OpenAI's `response_format`, or vLLM's fields."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from paceline.errors import InvalidRequestError
from paceline.structure import Structure
from paceline.text import did_you_mean

_OLD_NAMES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "guided_choice": "choice",
}
"""vLLM's older fields, each with the key of `structured_outputs` that replaced it."""


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

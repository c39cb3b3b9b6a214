"""Input files: JSON lines with one prompt a row, as in Spec-Bench, HumanEval and GSM8K.

A row has exactly one of `prompt` (text to continue), `question` (one chat message), `messages` (a
chat in OpenAI's format, with contents of text or of text parts) and `turns` (user turns, of which
only the first is used). Other keys are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from paceline.chat import Message, text_of_content
from paceline.errors import InvalidRequestError

Kind = Literal["prompt", "question", "messages", "turns"]

DEFAULT_INPUT = Path(__file__).parents[1] / "prompts" / "default.jsonl"
"""The prompts used if no input is named."""
BENCH_INPUTS = [
    DEFAULT_INPUT,
    *(DEFAULT_INPUT.with_name(f"{name}.jsonl") for name in ("edits", "repeats")),
]
"""Those of `paceline bench drafters`: also code edits with predictions, and texts that repeat."""

_JSON_NAMES: Mapping[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a text",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "null",
}
_KINDS: tuple[Kind, ...] = get_args(Kind)
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class InputRow:
    """A row to decode: text to continue, or a chat to answer.

    `index` counts the file's rows from 0, malformed ones included; `line` counts lines from 1.
    """

    path: Path
    index: int
    line: int
    id: str | int | None
    kind: Kind
    input: str | tuple[Message, ...]
    prediction: str | None = None

    def tell(self, wrong: str) -> str:
        """What is wrong with the row, preceded by its file and line."""
        return _tell(self.path, self.line, wrong)


@dataclass(frozen=True, slots=True)
class BadRow:
    """A malformed row. `message` names its file and line, and what is wrong."""

    index: int
    line: int
    id: str | int | None
    message: str


class _RowError(Exception):
    """What is wrong with a row."""


def read_rows(path: Path, *, limit: int | None = None) -> list[InputRow | BadRow]:
    """The rows of a file in order, malformed ones as BadRow. Blank lines are skipped.

    `limit`: return only the first rows. Raises InvalidRequestError if the file cannot be read or
    has no row.
    """
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise InvalidRequestError(
            "input", f"cannot read {path}: {error.strerror}; name a file of JSON lines"
        ) from None
    rows: list[InputRow | BadRow] = []
    for number, line in enumerate(lines, start=1):
        if limit is not None and len(rows) == limit:
            break
        if line.strip():
            rows.append(_read_row(path, line, index=len(rows), number=number))
    if not rows and limit != 0:
        raise InvalidRequestError("input", f"{path} holds no row; expected a JSON object a line")
    return rows


def _read_row(path: Path, line: bytes, *, index: int, number: int) -> InputRow | BadRow:
    row_id: str | int | None = None
    try:
        row = _parse(line)
        row_id = _id_of(row)
        kind = _kind_of(row)
        content = _READERS[kind](row[kind], kind)
        prediction = _text(row["prediction"], "prediction") if "prediction" in row else None
        return InputRow(path, index, number, row_id, kind, content, prediction)
    except _RowError as error:
        return BadRow(index, number, row_id, _tell(path, number, str(error)))


def _tell(path: Path, line: int, wrong: str) -> str:
    return f"{path}:{line}: {wrong}"


def _parse(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _RowError(f"is not UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise _RowError(f"is not JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise _RowError(f"is not JSON that can be read: {error}") from None
    if not isinstance(row, dict):
        raise _RowError(f"expected a JSON object, got {_JSON_NAMES[type(row)]}")
    return row


def _id_of(row: dict[str, Any]) -> str | int | None:
    row_id = row.get("id")
    if isinstance(row_id, bool) or not isinstance(row_id, str | int | None):
        raise _RowError(f"id: expected a text or a whole number, got {row_id!r}")
    return row_id


def _kind_of(row: dict[str, Any]) -> Kind:
    kinds = [kind for kind in _KINDS if kind in row]
    if len(kinds) != 1:
        came = " and ".join(kinds) or ", ".join(row) or "none"
        raise _RowError(f"expected one of {', '.join(_KINDS)}; it has {came}")
    return kinds[0]


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise _RowError(f"{name}: expected a text, got {_JSON_NAMES[type(value)]}")
    if not value:
        raise _RowError(f"{name}: is empty; write at least one character")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _RowError(f"{name}: holds half a surrogate pair, which is no character") from None
    return value


def _chat(value: object, name: str) -> tuple[Message, ...]:
    return (Message("user", _text(value, name)),)


def _items(value: object, name: str, of: str) -> list[Any]:
    if not isinstance(value, list):
        raise _RowError(f"{name}: expected a list of {of}, got {_JSON_NAMES[type(value)]}")
    if not value:
        raise _RowError(f"{name}: is empty; expected a list of at least one of {of}")
    return value


def _first_turn(value: object, name: str) -> tuple[Message, ...]:
    return _chat(_items(value, name, "texts")[0], f"{name}[0]")


def _messages(value: object, name: str) -> tuple[Message, ...]:
    found = _items(value, name, "messages")
    return tuple(_message(one, f"{name}[{number}]") for number, one in enumerate(found))


def _message(value: object, name: str) -> Message:
    if not isinstance(value, dict):
        raise _RowError(
            f"{name}: expected an object with role and content, got {_JSON_NAMES[type(value)]}"
        )
    for key in ("role", "content"):
        if key not in value:
            raise _RowError(f"{name}.{key}: is missing; a message has a role and a content")
    role = value["role"]
    if role not in _ROLES:
        raise _RowError(f"{name}.role: expected {' or '.join(_ROLES)}, got {json.dumps(role)}")
    return Message(role, _content(value["content"], f"{name}.content"))


def _content(value: object, name: str) -> str:
    """A text, or OpenAI's list of parts, all of which must be texts."""
    if isinstance(value, list):
        try:
            value = text_of_content(value)
        except InvalidRequestError as error:
            raise _RowError(f"{name}: {str(error).removeprefix('messages: ')}") from None
    return _text(value, name)


_READERS: Mapping[Kind, Callable[[object, str], str | tuple[Message, ...]]] = {
    "prompt": _text,
    "question": _chat,
    "messages": _messages,
    "turns": _first_turn,
}

"""What an answer must be: JSON, a regular expression, a grammar, or one of some texts."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import InvalidRequestError
from paceline.limits import MAX_CHOICE_TEXTS, MAX_STRUCTURE_BYTES


class StructureKind(enum.Enum):
    """The kinds of structures, by their fields in types.proto."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class Structure:
    """What the text of an answer must be (types.proto, Structure). Make one with its class methods.

    `text`: the schema, the expression or the grammar. `choices`: the texts to choose from.
    """

    kind: StructureKind
    text: str = ""
    choices: tuple[str, ...] = ()

    @classmethod
    def json_object(cls) -> Structure:
        """Any JSON object."""
        return cls(StructureKind.JSON_OBJECT)

    @classmethod
    def json_schema(cls, schema: str | Mapping[str, Any] | bool) -> Structure:
        """JSON that is valid by a schema, which is a table or JSON text."""
        text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
        return cls(StructureKind.JSON_SCHEMA, text)

    @classmethod
    def regex(cls, pattern: str) -> Structure:
        """Text that a regular expression matches as a whole."""
        return cls(StructureKind.REGEX, pattern)

    @classmethod
    def grammar(cls, lark: str) -> Structure:
        """Text of a grammar in llguidance's dialect of Lark."""
        return cls(StructureKind.GRAMMAR, lark)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Structure:
        """One of some texts."""
        return cls(StructureKind.CHOICE, choices=tuple(texts))


def check_structure(name: str, value: Structure) -> None:
    """Raise InvalidRequestError, which names the field, for a structure beyond its limits."""
    if not isinstance(value, Structure):
        raise InvalidRequestError(name, f"expected a Structure, got {value!r:.200}")
    texts = value.choices if value.kind is StructureKind.CHOICE else (value.text,)
    if len(texts) > MAX_CHOICE_TEXTS:
        raise InvalidRequestError(
            name, f"expected at most {MAX_CHOICE_TEXTS:,} texts to choose from, got {len(texts):,}"
        )
    try:
        size = sum(len(text.encode()) for text in texts)
    except (AttributeError, UnicodeEncodeError):
        raise InvalidRequestError(name, "expected text of valid Unicode") from None
    if size > MAX_STRUCTURE_BYTES:
        raise InvalidRequestError(
            name, f"expected at most {MAX_STRUCTURE_BYTES:,} bytes, got {size:,}"
        )
    if value.kind is not StructureKind.JSON_OBJECT and not (texts and all(texts)):
        raise InvalidRequestError(
            name, f"expected a {value.kind.value} with text, got an empty one"
        )

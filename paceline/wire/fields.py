"""Fields of messages: read into dataclasses whose fields have the same names, and set with errors
that name them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableSequence
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor

from paceline.errors import InvalidRequestError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Value = TypeVar("_Value", bound="DataclassInstance")

_EXPECTED = {
    FieldDescriptor.CPPTYPE_UINT32: f"an integer from 0 to {2**32 - 1}",
    FieldDescriptor.CPPTYPE_UINT64: f"an integer from 0 to {2**64 - 1}",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_BOOL: "True or False",
    FieldDescriptor.CPPTYPE_STRING: "text of valid Unicode",
}
_SHOWN = 200
"""Longest representation of a wrong value in an error, in characters."""


def values_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by name. A message leaves out what is None."""
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def read_fields(kind: type[_Value], message: Any, **nested: object) -> _Value:
    """A dataclass whose fields are in `nested`, or in the message. A missing one is None."""
    values = dict(nested)
    for name in kind.__dataclass_fields__.keys() - nested.keys():
        is_missing = message.DESCRIPTOR.fields_by_name[name].has_presence and not message.HasField(
            name
        )
        values[name] = None if is_missing else plain(getattr(message, name))
    return kind(**values)


def plain(value: Any) -> Any:
    """A field's value, with a dict or a tuple in place of protobuf's containers."""
    if isinstance(value, Mapping):
        return dict(value)
    return tuple(value) if isinstance(value, MutableSequence) else value


def set_field(message: Any, name: str, value: object, *, field: str | None = None) -> None:
    """Set a field that a caller gave; an error names it, or `field`. Raises InvalidRequestError."""
    expected = _EXPECTED[message.DESCRIPTOR.fields_by_name[name].cpp_type]
    attempt(field or name, expected, value, lambda: setattr(message, name, value))


def attempt(field: str, expected: str, value: object, assign: Callable[[], None]) -> None:
    """Assign a value. Protobuf checks its type; its error becomes an InvalidRequestError."""
    try:
        assign()
    except (TypeError, ValueError, AttributeError) as error:
        got = repr(value)
        shown = got if len(got) <= _SHOWN else f"{got[:_SHOWN]}... ({error})"
        raise InvalidRequestError(field, f"expected {expected}, got {shown}") from error

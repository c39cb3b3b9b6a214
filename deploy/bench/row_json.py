"""A benchmark's row as the object that its document holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any, ClassVar, Protocol


class DetailedRow(Protocol):
    """A dataclass with further figures by name in `details`."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def details(self) -> Mapping[str, object]:
        """Figures that not every row has."""


def row_json(row: DetailedRow) -> dict[str, object]:
    """Every field by its name, and the details beside them."""
    named = {
        field.name: getattr(row, field.name) for field in fields(row) if field.name != "details"
    }
    return {**named, **row.details}

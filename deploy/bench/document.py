"""The document of a benchmark whose rows have details, and whose goals are ratios."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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


class RatioGoal(Protocol):
    """What was aimed at, by name, and what came of it."""

    @property
    def name(self) -> str:
        """Of the ratio."""

    @property
    def ratio(self) -> float:
        """As measured."""


def document(
    suite: str,
    rows: Sequence[DetailedRow],
    goals: Iterable[RatioGoal],
    machine: Mapping[str, object],
) -> dict[str, object]:
    """What `bench --json` writes of a suite on real devices."""
    return {
        "suite": suite,
        "machine": machine,
        "emulated": False,
        "rows": [row_json(row) for row in rows],
        "ratios": {goal.name: goal.ratio for goal in goals},
    }

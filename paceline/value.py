"""Frozen dataclasses that are made by the thousand: one a candidate, a verdict, a message."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["value_class"]

if TYPE_CHECKING:
    from dataclasses import dataclass as value_class
else:
    from dataclasses import dataclass

    def value_class(*, frozen: bool, slots: bool):
        """`dataclass`, but that it is mypy which sees to it that nothing is assigned.

        A frozen dataclass asks at each field of each object that is made; that takes four times as
        long as to make one that does not (Python 3.11).
        """
        assert frozen
        return dataclass(slots=slots, unsafe_hash=True)

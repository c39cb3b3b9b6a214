"""Draws what devices do as lanes of one time line, as wide as a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

from rich.text import Text

IDLE = "·"
_SHADES = "█▓"
"""Spans that follow each other have these in turns, so that their bounds are seen."""


@dataclass(frozen=True, slots=True)
class Span:
    """A pass of a device, in seconds of any one clock. `mark`: what to write below its end."""

    begin: float
    end: float
    mark: str = ""


def drawn(
    lanes: Mapping[str, Sequence[Span]],
    styles: Mapping[str, str],
    *,
    begin: float,
    end: float,
    width: int,
) -> list[Text]:
    """A line for each lane from `begin` to `end`, and one below it if its spans have marks.

    A column shows the span that its middle lies in. `styles` has rich's style of each lane.
    """
    indent = max(map(len, lanes)) + 2
    columns = width - indent
    per_column = (end - begin) / columns
    lines = []
    for name, spans in lanes.items():
        cells, marks = [IDLE] * columns, [" "] * (columns + indent)
        for span, shade in zip(spans, cycle(_SHADES), strict=False):
            first = max(0, round((span.begin - begin) / per_column))
            last = min(columns, round((span.end - begin) / per_column))
            cells[first:last] = shade * max(0, last - first)
            if last > 0 and first < columns:
                at = max(0, last - len(span.mark))
                marks[at : at + len(span.mark)] = span.mark
        lines.append(Text(name.ljust(indent)) + Text("".join(cells[:columns]), styles[name]))
        if any(span.mark for span in spans):
            lines.append(Text(" " * indent + "".join(marks).rstrip()))
    return lines


def seconds_together(one: Sequence[Span], other: Sequence[Span]) -> float:
    """How long a span of one lane and a span of another last at once."""
    return sum(
        max(0.0, min(first.end, second.end) - max(first.begin, second.begin))
        for first in one
        for second in other
    )

"""The chart of `paceline bench plot`: what a suite measured, as bars in an SVG."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.rows.outputs import write_text
from paceline.errors import InvalidRequestError
from paceline.text import install_hint

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIGURES = {"speedup": "times the speed of its row off", "tokens_per_second": "tokens/s"}
"""What bars may show: the first that a row has. The base of `speedup` is 1."""
PANELS = ("file", "part", "batch")
"""Fields whose values, if they differ, make panels of their own."""
LABELS = ("target_groups", "drafters", "rtt_ms", "acceptance", "hit_rate", "window", "branches")
"""Fields that tell rows of one name in one panel apart."""
MAX_BARS = 200
_INK, _PAPER, _BAR, _BASE = "#1f2328", "#fffffe", "#0969da", "#59636e"
_DARK = {_INK: "#f0f6fc", _PAPER: "#0d1117", _BAR: "#4493f8", _BASE: "#9198a1"}
"""What takes the place of each color where the reader prefers dark pages."""


@dataclass(frozen=True, slots=True)
class Bar:
    panel: tuple[str, ...]
    label: str
    value: float


def draw_file(path: Path, output: Path | None) -> Path:
    """Draw the JSON of a bench beside it, or to `output`; returns the picture's path.

    Raises InvalidRequestError if there is no matplotlib, or nothing to draw.
    """
    if (target := output or path.with_suffix(".svg")).suffix.lower() != ".svg":
        raise InvalidRequestError("output", f"expected a file that ends in .svg, got {target}")
    if find_spec("matplotlib") is None:
        raise InvalidRequestError("plot", f"needs matplotlib; {install_hint('plan')}")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequestError("file", f"{path}: expected JSON of a bench; {error}") from None
    rows = document.get("rows") if isinstance(document, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InvalidRequestError("file", f"{path}: expected an object with a list `rows`")
    write_text(target, _svg(document, rows, path), flag="output")
    return target


def bars_of(rows: Sequence[Mapping[str, Any]], figure: str) -> list[Bar]:
    """A bar for each row with the figure. A row may have objects, as for policies, each a bar."""
    flat = [one for row in rows for one in _flat(row) if isinstance(one.get(figure), int | float)]
    panels = [name for name in PANELS if len({repr(one.get(name)) for one in flat}) > 1]
    found: dict[tuple[tuple[str, ...], str], list[Mapping[str, Any]]] = {}
    for one in flat:
        panel = tuple(f"{name.replace('_', ' ')} {one.get(name, '-')}" for name in panels)
        found.setdefault((panel, _name(one)), []).append(one)
    bars = []
    for (panel, name), alike in found.items():
        telling = [key for key in LABELS if len({repr(one.get(key)) for one in alike}) > 1]
        for one in alike:
            told = [f"{key.removesuffix('_ms')} {_short(one.get(key))}" for key in telling]
            bars.append(Bar(panel, ", ".join([name, *told]), float(one[figure])))
    return bars


def _flat(row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield row
    around = {key: value for key, value in row.items() if key not in FIGURES}
    for key, value in row.items():
        if isinstance(value, dict):
            yield {**around, **value, "policy": key, "inner": True}


def _name(row: Mapping[str, Any]) -> str:
    name = str(row.get("name") or row.get("rule") or row.get("kind") or row.get("policy") or "")
    return f"{name}, {row['policy']}" if row.get("inner") else name


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _svg(document: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], path: Path) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    drawable = ((name, bars) for name in FIGURES if (bars := bars_of(rows, name)))
    figure, bars = next(drawable, ("", []))
    if not 1 <= len(bars) <= MAX_BARS:
        raise InvalidRequestError(
            "file",
            f"{path}: expected 1 to {MAX_BARS} rows with {' or '.join(FIGURES)}, got {len(bars)}",
        )
    panels = list(dict.fromkeys(bar.panel for bar in bars))
    heights = [2 + sum(bar.panel == panel for bar in bars) for panel in panels]
    style: Any = {  # Its type is a mapping with 300 literal keys.
        **{"svg.hashsalt": "paceline", "svg.fonttype": "none", "text.parse_math": False},
        **{f"{part}.facecolor": _PAPER for part in ("figure", "axes", "savefig")},
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor"), _INK),
        **dict.fromkeys(("xtick.color", "ytick.color", "axes.edgecolor"), _INK),
    }
    with matplotlib.rc_context(style):
        drawing = Figure(figsize=(8, 1.2 + 0.26 * sum(heights)))
        columns = drawing.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, panel in zip(columns, panels, strict=True):
            _draw(axes, [bar for bar in bars if bar.panel == panel], figure)
            axes.set_title(", ".join(panel), fontsize="medium", loc="left")
            axes.set_xlim(0, 1.12 * max(bar.value for bar in bars))
        columns[-1].set_xlabel(FIGURES[figure])
        drawing.suptitle(_title(document), fontsize="medium")
        drawing.set_layout_engine("constrained")
        drawn = io.StringIO()
        drawing.savefig(drawn, format="svg", metadata={"Date": None})
    rules = "".join(
        f'[style*="{what}: {light}"]{{{what}:{dark}!important}}'
        for light, dark in _DARK.items()
        for what in ("fill", "stroke")
    )
    sheet = f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>"
    return drawn.getvalue().replace("<defs>", f"{sheet}\n <defs>", 1)


def _draw(axes: Axes, bars: Sequence[Bar], figure: str) -> None:
    drawn = axes.barh(range(len(bars)), [bar.value for bar in bars], color=_BAR, height=0.7)
    axes.bar_label(drawn, [f"{bar.value:.2f}" for bar in bars], padding=3, fontsize="small")
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars], fontsize="small")
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if figure == "speedup":
        axes.axvline(1, color=_BASE, linewidth=1, linestyle="--")


def _title(document: Mapping[str, Any]) -> str:
    machine = document.get("machine") or {}
    emulated: Any = document.get("emulated")
    kind = {True: "EMULATED", False: "measured"}.get(emulated, f"emulated: {emulated}")
    where = f"{machine.get('cpu', 'unknown processor')}, {machine.get('cores', '?')} cores"
    return f"bench {document.get('suite', '?')}, {kind}; {where}, {machine.get('date', 'no date')}"

"""The chart of `paceline plan --chart`: throughput and cost against latency, as SVG."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.config.plan import PlanConfig
from cluster.simulation.plan import Plan
from cluster.simulation.trial import PlannedLayout
from deploy.rows.outputs import write_text
from paceline.errors import InvalidRequestError
from paceline.text import install_hint

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKERS = "osD^vP*X<>"
_MOST_NAMED = 40
"""Lines that the legend names."""


def check_chart(path: Path) -> None:
    """Raise InvalidRequestError unless a chart can be drawn to this file."""
    if path.suffix.lower() != ".svg":
        raise InvalidRequestError("chart", f"expected a file that ends in .svg, got {path}")
    if find_spec("matplotlib") is None:
        raise InvalidRequestError("chart", f"needs matplotlib; {install_hint('plan')}")


def write_chart(path: Path, asked: PlanConfig, plan: Plan) -> None:
    """Draw the figures: a line for each layout over its loads, with thick lines for its seeds.

    A point is at the median latency, and a thin line leads from it to the 95th percentile.
    """
    import matplotlib
    from matplotlib.figure import Figure

    priced = any(one.cost_per_million is not None for one in plan.rows)
    lines = _lines(plan.rows)
    # The same figures give the same file. Names may have a dollar sign.
    with matplotlib.rc_context(
        {"svg.hashsalt": "paceline", "svg.fonttype": "none", "text.parse_math": False}
    ):
        figure = Figure(figsize=(8 * (1 + priced), 6 + 0.2 * min(len(lines), _MOST_NAMED)))
        axes = figure.subplots(1, 1 + priced, squeeze=False)[0]
        _draw(axes[0], lines, lambda one: one.tokens_per_second_per_gpu, ranged=True)
        axes[0].set_ylabel("tokens/s per GPU that is paid for")
        if priced:
            assert asked.rent is not None
            _draw(axes[1], lines, lambda one: one.cost_per_million or 0.0)
            axes[1].set_ylabel(f"{asked.rent.currency} per million tokens, at the prices given")
        for one in axes:
            one.set_xlabel("ms a token: median, and a thin line to the 95th percentile")
            one.set_xlim(left=0)
            one.set_ylim(bottom=0)
            one.grid(visible=True, alpha=0.3)
            if asked.rent is not None and asked.rent.max_token_ms is not None:
                one.axvline(asked.rent.max_token_ms, color="black", linestyle="--", linewidth=1)
        loads = sorted({one.callers for one in plan.rows if one.callers is not None})
        load = f"{', '.join(map(str, loads))} callers" if loads else "random arrivals"
        figure.suptitle(f"SIMULATED by paceline plan, {load}; nothing was measured on a GPU")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(
            handles[:_MOST_NAMED], labels[:_MOST_NAMED], loc="outside lower left", fontsize="small"
        )
        figure.set_layout_engine("constrained")
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    write_text(path, drawn.getvalue(), flag="chart")


def _lines(rows: Sequence[PlannedLayout]) -> list[list[PlannedLayout]]:
    """The rows of each layout, by load."""
    found: dict[int, list[PlannedLayout]] = {}
    for one in rows:
        found.setdefault(id(one.layout), []).append(one)
    return [sorted(line, key=lambda one: one.callers or 0) for line in found.values()]


def _draw(
    axes: Axes,
    lines: Sequence[Sequence[PlannedLayout]],
    height: Callable[[PlannedLayout], float],
    *,
    ranged: bool = False,
) -> None:
    """A color for each place, a marker for each policy; `ranged`: the ranges of the seeds."""
    places = list(dict.fromkeys(_place(line[0]) for line in lines))
    policies = list(dict.fromkeys(line[0].layout.policy for line in lines))
    for line in lines:
        layout = line[0].layout
        color = f"C{places.index(_place(line[0])) % 10}"
        marker = _MARKERS[policies.index(layout.policy) % len(_MARKERS)]
        x, y = [one.figures.token_ms.p50 for one in line], [height(one) for one in line]
        style = "--" if layout.drafter is None else "-"
        axes.plot(x, y, style, color=color, marker=marker, label=layout.name, alpha=0.8)
        axes.hlines(
            y, x, [one.figures.token_ms.p95 for one in line], colors=color, linewidth=0.7, alpha=0.6
        )
        if ranged:
            lows, highs = zip(*(one.tokens_per_second_range for one in line), strict=True)
            gpus = layout.gpus
            axes.vlines(
                x,
                [low / gpus for low in lows],
                [high / gpus for high in highs],
                colors=color,
                linewidth=2,
            )
            lefts, rights = zip(*(one.token_ms_range for one in line), strict=True)
            axes.hlines(y, lefts, rights, colors=color, linewidth=2)


def _place(one: PlannedLayout) -> str:
    """What decides the color: the hosts, or the target where hosts are not to be rented."""
    rental = one.layout.rental
    return rental.name if rental is not None else one.layout.target.name

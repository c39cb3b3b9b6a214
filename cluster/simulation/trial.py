"""Simulates a part of a layout and its load, and computes the figures."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from cluster.config.model import PlanConfig
from cluster.simulation.figures import Course, Figures, course_of, figures_of
from cluster.simulation.fleet import Fleet
from cluster.simulation.layout import Layout, Load
from workers.emulated.replay_text import Guess

KEEPS_UP = 0.95
"""Share of the arriving requests that must be answered meanwhile for a layout to keep up."""
GROUPS_OF_A_ROUTER = 8
"""The most target groups that one router serves. Larger layouts have more routers, and callers are
divided among them evenly."""
GENERATIONS = 4
"""The fewest simulated requests for each caller. If need be, fewer groups are simulated. Less than
two of these generations are measured."""
FASTER = 1.02
"""The least ratio at which a layout counts as faster than another."""


@dataclass(frozen=True, slots=True)
class PlannedLayout:
    """A layout, the figures of the part that was simulated, and how it compares.

    `scale`: the whole load over the simulated load; rates in `figures` belong to the part.
    `speedup`, `per_gpu_gain`: relative to plain decoding on the same kind of target.
    """

    layout: Layout
    simulated_groups: int
    scale: float
    figures: Figures
    same_text: bool
    keeps_up: bool
    speedup: float = 1.0
    per_gpu_gain: float = 1.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens/s of all its groups together."""
        return self.figures.tokens_per_second * self.scale

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Tokens/s over the GPUs that it occupies."""
        return self.tokens_per_second / self.layout.gpus

    @property
    def faster_but_worse_per_gpu(self) -> bool:
        """Whether it is faster, but plain decoding would make more of the same GPUs."""
        return self.speedup > FASTER and self.per_gpu_gain < 1


def simulate_layout(layout: Layout, asked: PlanConfig, concurrency: int) -> PlannedLayout:
    """Simulate some cells of a layout with their part of the load."""
    cells = layout.cells
    if asked.simulated_groups:
        cells = min(cells, max(1, asked.simulated_groups // layout.groups_a_cell))
        if asked.requests_per_second is None:
            few_callers = asked.requests // GENERATIONS * layout.cells // concurrency
            cells = min(cells, max(1, few_callers))
    scale = layout.cells / cells
    per_second, requests = asked.requests_per_second, asked.requests
    callers = None
    if per_second is None:
        callers = max(1, round(concurrency / scale))
        scale = concurrency / callers
        requests = max(requests, GENERATIONS * callers)
    load = Load(
        requests=requests,
        prompt_tokens=asked.prompt_tokens,
        output_tokens=asked.output_tokens,
        guess=Guess(asked.acceptance, asked.hit_rate, asked.seed),
        concurrency=callers,
        per_second=None if per_second is None else per_second / scale,
        out_of_step=True,
    )
    courses: list[Course] = []
    same_text = True
    with _collecting_seldom():
        for part, share in _parts(replace(layout, cells=cells), load):
            fleet = Fleet(part, share)
            fleet.run()
            fleet.check_end()
            same_text &= fleet.same_text
            courses.append(course_of(fleet))
    figures = figures_of(courses)
    keeps_up = load.concurrency is not None or all(_keeps_up(course) for course in courses)
    return PlannedLayout(
        layout,
        cells * layout.groups_a_cell,
        scale,
        figures,
        same_text,
        keeps_up,
    )


def _keeps_up(course: Course) -> bool:
    """Whether requests that come at random are answered about as fast as they come.

    It compares with the requests that came, not with how many were expected: in a hundred of these,
    luck alone makes a tenth. The number of waiting requests varies by its square root.
    """
    begin, end = course.begin, course.end
    if not begin.time:  # All were asked before the first answers, or there were hardly any more.
        arriving = max(one.arrived for one in course.answered)
        return course.rate("answered") * arriving >= KEEPS_UP * end.asked
    unanswered = end.asked - end.answered
    more = unanswered - (begin.asked - begin.answered)
    return more <= (1 - KEEPS_UP) * (end.asked - begin.asked) + math.sqrt(unanswered)


def _parts(layout: Layout, load: Load) -> Iterator[tuple[Layout, Load]]:
    """Split a layout into parts that share nothing, each with a router and a part of the load."""
    count = max(1, layout.groups // GROUPS_OF_A_ROUTER)
    count = min(count, layout.cells, load.requests, load.concurrency or load.requests)
    for number in range(count):

        def share(total: int, number: int = number) -> int:
            return total * (number + 1) // count - total * number // count

        cells = share(layout.cells)
        part = load.per_second and load.per_second * cells / layout.cells
        callers = load.concurrency and share(load.concurrency)
        yield (
            replace(layout, cells=cells),
            replace(
                load,
                requests=share(load.requests),
                first_request=load.requests * number // count,
                concurrency=callers,
                per_second=part,
            ),
        )


@contextmanager
def _collecting_seldom() -> Iterator[None]:
    """Collect garbage seldom: there are few cycles among many objects that live on."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()

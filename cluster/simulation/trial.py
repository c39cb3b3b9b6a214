"""Simulates a part of a layout and its load, and computes figures: rates, latencies, shares."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from cluster.config.plan_question import PlanConfig
from cluster.simulation.fleet import Answered, Fleet, Snapshot
from cluster.simulation.layout import Layout, Load
from workers.emulated.replay_text import Guess

KEEPS_UP = 0.95
"""A layout keeps up if it answers at least this share of the requests that arrive meanwhile."""
GROUPS_OF_A_ROUTER = 8
"""The most target groups that one router serves. Larger layouts have more routers, and callers are
divided among them evenly."""
GENERATIONS = 4
"""The fewest simulated requests for each caller. If need be, fewer groups are simulated. Less than
two of these generations are measured."""
FASTER = 1.02
"""The least ratio at which a layout counts as faster than another."""


MOST_TOKENS = 50_000_000
"""Upper bound on the tokens of prompts and answers that are simulated for a layout and a load. A
request counts as 256 tokens at least."""


class Percentiles(NamedTuple):
    """Of a figure over requests, each the nearest rank."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the target groups' time.

    `prefill`: steps with prefill, a part of `busy`. `waiting`: without a step although there were
    requests. `idle`: without requests.
    """

    busy: float
    prefill: float
    waiting: float
    idle: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of the measured requests. Times are milliseconds.

    `ttft_ms`: from asking to the first token. `token_ms`: of a request, from its first token to its
    last one, a token. `completed_per_second`: requests. `draft_used`: of the candidates that
    drafters computed (counts.py); None without drafters.
    """

    tokens_per_second: float
    completed_per_second: float
    ttft_ms: Percentiles
    token_ms: Percentiles
    acceptance_length: float
    target: Shares
    drafter_busy: float | None
    draft_used: float | None
    requests: int


@dataclass(frozen=True, slots=True)
class Course:
    """The part of a fleet's run that is measured.

    `begin`, `end`: the moments between which it was in full swing. `answered`: requests that ended
    after `begin`.
    """

    begin: Snapshot
    end: Snapshot
    answered: Sequence[Answered]
    num_targets: int
    num_drafters: int

    @property
    def seconds(self) -> float:
        return self.end.time - self.begin.time

    def rate(self, name: str) -> float:
        """Growth per second of a counter of the snapshots, by its name."""
        grown: float = getattr(self.end, name) - getattr(self.begin, name)
        return grown / self.seconds


def course_of(fleet: Fleet) -> Course:
    """The measured part: from a first generation of answers until the last request was asked.

    For a load too small for that: from begin to end.
    """
    begin, end = fleet.in_full_swing
    answered = [one for one in fleet.answered if one.last_at > begin.time]
    return Course(begin, end, answered, len(fleet.targets), len(fleet.drafters))


def figures_of(courses: Sequence[Course]) -> Figures:
    """Figures of fleets side by side: rates added up, percentiles over all requests."""
    targets = sum(one.num_targets for one in courses)
    drafters = sum(one.num_drafters for one in courses)
    answered = [request for one in courses for request in one.answered]

    def rate(name: str) -> float:
        return sum(one.rate(name) for one in courses)

    busy, waiting = rate("target_busy") / targets, rate("target_waiting") / targets
    drafted = rate("drafted")
    return Figures(
        tokens_per_second=rate("committed"),
        completed_per_second=rate("answered"),
        ttft_ms=_percentiles([one.first_at - one.arrived for one in answered]),
        token_ms=_percentiles([_per_token(one) for one in answered]),
        acceptance_length=sum(len(one.token_ids) for one in answered)
        / sum(one.steps for one in answered),
        target=Shares(
            busy, rate("target_prefill") / targets, waiting, max(0.0, 1 - busy - waiting)
        ),
        drafter_busy=rate("drafter_busy") / drafters if drafters else None,
        draft_used=rate("used") / drafted if drafted else None,
        requests=len(answered),
    )


def in_swing_of(together: Sequence[Sequence[tuple[float, int]]]) -> tuple[int, float]:
    """Tokens and seconds of requests asked together, counted once each of them has a token.

    Of each, the times at which tokens came, and how many came then.
    """
    begin = max(arrivals[0][0] for arrivals in together)
    tokens = sum(num for arrivals in together for at, num in arrivals if at > begin)
    return tokens, max(arrivals[-1][0] for arrivals in together) - begin


def _per_token(one: Answered) -> float:
    return (one.last_at - one.first_at) / max(1, len(one.token_ids) - 1)


def _percentiles(seconds: Sequence[float]) -> Percentiles:
    """In milliseconds."""
    ordered = sorted(seconds)
    return Percentiles(
        *(1000 * ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.95, 0.99))
    )


def mean_of(runs: Sequence[Figures]) -> Figures:
    """The mean of each figure over runs with several seeds; requests are added up."""

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    found: dict[str, object] = {}
    for name in (one.name for one in fields(Figures)):
        values = [getattr(run, name) for run in runs]
        if isinstance(values[0], Percentiles):
            found[name] = Percentiles(*map(mean, zip(*values, strict=True)))
        elif isinstance(values[0], Shares):
            parts = [one.name for one in fields(Shares)]
            found[name] = Shares(*(mean([getattr(v, part) for v in values]) for part in parts))
        else:
            found[name] = None if None in values else mean(values)
    requests = sum(run.requests for run in runs)
    return Figures(**{**found, "requests": requests})  # type: ignore[arg-type]  # by name


@dataclass(frozen=True, slots=True)
class Run:
    """What to simulate at a time: a layout, its callers (None: requests come at random), a seed."""

    layout: Layout
    callers: int | None
    seed: int

    def size(self, asked: PlanConfig) -> tuple[int, int]:
        """Simulated cells and simulated requests."""
        layout, cells = self.layout, self.layout.cells
        requests = asked.requests
        if asked.simulated_groups and not layout.beside:
            cells = min(cells, max(1, asked.simulated_groups // layout.groups_a_cell))
            if self.callers is not None:
                few_callers = asked.requests // GENERATIONS * layout.cells // self.callers
                cells = min(cells, max(1, few_callers))
        if self.callers is not None:
            requests = max(requests, GENERATIONS * max(1, self.callers * cells // layout.cells))
        return cells, requests

    def tokens(self, asked: PlanConfig) -> int:
        """Simulated tokens, for the bound on them (MOST_TOKENS)."""
        return self.size(asked)[1] * max(256, asked.prompt_tokens + asked.output_tokens)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run's figures, which are those of `simulated_groups`.

    `scale`: the whole load over the simulated load; rates in `figures` belong to the part.
    """

    figures: Figures
    simulated_groups: int
    scale: float
    same_text: bool
    keeps_up: bool


@dataclass(frozen=True, slots=True)
class PlannedLayout:
    """A layout under a load, the outcomes of its seeds, and how it compares.

    `speedup`, `per_gpu_gain`: relative to the fastest plain decoding on the same kind of target; of
    a rental, on all its GPUs.
    """

    layout: Layout
    callers: int | None
    outcomes: tuple[Outcome, ...]
    figures: Figures
    speedup: float = 1.0
    per_gpu_gain: float = 1.0

    @property
    def simulated_groups(self) -> int:
        return self.outcomes[0].simulated_groups

    @property
    def same_text(self) -> bool:
        return all(one.same_text for one in self.outcomes)

    @property
    def keeps_up(self) -> bool:
        """Whether requests were answered as fast as they came, with every seed."""
        return all(one.keeps_up for one in self.outcomes)

    @property
    def tokens_per_second(self) -> float:
        """Tokens/s of all its groups together."""
        return self.figures.tokens_per_second * self.outcomes[0].scale

    @property
    def tokens_per_second_range(self) -> tuple[float, float]:
        """The lowest and the highest of the seeds."""
        found = [one.figures.tokens_per_second * one.scale for one in self.outcomes]
        return min(found), max(found)

    @property
    def token_ms_range(self) -> tuple[float, float]:
        """The lowest and the highest median of the seeds."""
        found = [one.figures.token_ms.p50 for one in self.outcomes]
        return min(found), max(found)

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_second / self.layout.gpus

    @property
    def cost_per_million(self) -> float | None:
        """The price of a million tokens; None without prices."""
        rental = self.layout.rental
        if rental is None or rental.price_per_hour is None:
            return None
        return rental.price_per_hour / 3600 / self.tokens_per_second * 1e6

    @property
    def faster_but_worse_per_gpu(self) -> bool:
        """Whether it is faster, but plain decoding would make more of the same GPUs."""
        return self.speedup > FASTER and self.per_gpu_gain < 1


def simulate_run(run: Run, asked: PlanConfig) -> Outcome:
    """Simulate some cells of a layout with their part of the load."""
    layout = run.layout
    cells, requests = run.size(asked)
    scale = layout.cells / cells
    callers = None
    if run.callers is not None:
        callers = max(1, round(run.callers / scale))
        scale = run.callers / callers
        requests = max(requests, GENERATIONS * callers)
    per_second = asked.requests_per_second
    load = Load(
        requests=requests,
        prompt_tokens=asked.prompt_tokens,
        output_tokens=asked.output_tokens,
        guess=Guess(asked.acceptance, asked.hit_rate, run.seed),
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
    return Outcome(
        figures_of(courses),
        cells * layout.groups_a_cell + sum(one.groups for one in layout.beside),
        scale,
        same_text,
        keeps_up=load.concurrency is not None or all(_keeps_up(course) for course in courses),
    )


def _keeps_up(course: Course) -> bool:
    """Whether requests that come at random are answered about as fast as they come.

    It compares with the number of requests that came, not with the expected number: of a hundred
    expected requests, a tenth more or less comes by luck alone. The number of waiting requests
    varies by its square root.
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
    count = 1 if layout.beside else max(1, layout.groups // GROUPS_OF_A_ROUTER)
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

"""`paceline plan`: the figures of a question's layouts under its loads, and which one to rent."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context

from cluster.config.model import Config
from cluster.config.plan_question import PlanConfig
from cluster.decoding.policies.off import OFF
from cluster.simulation.candidate_layouts import Skipped, candidates
from cluster.simulation.layout import Layout
from cluster.simulation.trial import (
    MOST_TOKENS,
    Outcome,
    PlannedLayout,
    Run,
    mean_of,
    simulate_run,
)
from paceline.errors import ConfigError
from paceline.text import counted

DEFAULT_CONCURRENCY = 8
"""Callers for each target group of plain decoding, if no load is given."""
_WORK_OF_DRAFTING = 3.0
"""Simulating a drafted token takes about this many times as long as one of plain decoding."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer: layouts by load, each load's best first, and what was left out.

    `chosen`: of the largest load at which anything meets the targets, the best. It has devices of
    one kind for targets, so that one deployment can have them.
    """

    rows: tuple[PlannedLayout, ...]
    skipped: tuple[Skipped, ...]
    chosen: PlannedLayout | None


def make_plan(config: Config, *, tell: Callable[[str, float], None], jobs: int = 1) -> Plan:
    """Simulate every layout under every load.

    Layouts that keep up and meet the latency targets come first; then the cheapest a token, if
    there are prices; else by tokens/s, or under a fixed rate of requests by latency. `tell` gets a
    message and the share of the work that is done. Raises ConfigError if no layout fits the hosts,
    no request the KV, or the question is too large. `jobs`: simulations at a time, each in a
    process of its own. The figures do not depend on it.
    """
    asked = config.plan
    layouts, skipped = candidates(config)
    loads = loads_of(asked, layouts)
    runs = [
        Run(layout, callers, asked.seed + number)
        for callers in loads
        for layout in layouts
        for number in range(_num_seeds(layout, asked))
    ]
    for run in runs:
        _check_size(run, asked)
    runs.sort(key=lambda run: -_work(run, asked))
    tell(f"simulating {counted(len(layouts), 'layout')} in {counted(len(runs), 'run')}", 0.0)
    all_work = sum(_work(run, asked) for run in runs)
    done, outcomes = 0.0, defaultdict(list)
    for number, (run, outcome) in enumerate(_simulated(runs, asked, jobs), start=1):
        done += _work(run, asked)
        outcomes[id(run.layout), run.callers].append((run.seed, outcome))
        speed = f"{outcome.figures.tokens_per_second * outcome.scale:,.0f} tokens/s"
        tell(f"simulated {number} of {len(runs)}: {run.layout.name}: {speed}", done / all_work)
    planned = []
    for layout in layouts:
        for callers in loads:
            found = [one for _, one in sorted(outcomes[id(layout), callers], key=_seed)]
            figures = mean_of([one.figures for one in found])
            planned.append(PlannedLayout(layout, callers, tuple(found), figures))
    rows = sorted(_compared(planned), key=lambda one: _rank(one, asked))
    good = [one for one in rows if meets_targets(one, asked)]
    good = [one for one in good if not one.layout.beside]
    most = max((one.callers or 0 for one in good), default=0)
    chosen = next((one for one in good if (one.callers or 0) == most), None)
    return Plan(tuple(rows), tuple(skipped), chosen)


def loads_of(asked: PlanConfig, layouts: Iterable[Layout]) -> tuple[int | None, ...]:
    """Callers in total, the same for each layout; None: requests come at random."""
    if asked.requests_per_second is not None:
        return (None,)
    if asked.concurrency is not None:
        return tuple(sorted(set(asked.concurrency)))
    return (DEFAULT_CONCURRENCY * max(layout.groups for layout in layouts),)


def meets_targets(one: PlannedLayout, asked: PlanConfig) -> bool:
    """Whether a layout keeps up, with the latency that [plan.rent] asks for."""
    rent = asked.rent
    if rent is None:
        return one.keeps_up
    figures = one.figures
    limits = ((rent.max_token_ms, figures.token_ms), (rent.max_first_ms, figures.ttft_ms))
    return one.keeps_up and all(most is None or found.p95 <= most for most, found in limits)


def _rank(one: PlannedLayout, asked: PlanConfig) -> tuple[float, ...]:
    order = -one.tokens_per_second
    if one.cost_per_million is not None:
        order = one.cost_per_million
    elif asked.rent is not None:
        order = -one.tokens_per_second_per_gpu
    if asked.requests_per_second is not None and one.keeps_up and one.cost_per_million is None:
        order = one.figures.token_ms.p50
    return (one.callers or 0, not meets_targets(one, asked), not one.keeps_up, order)


def _seed(found: tuple[int, Outcome]) -> int:
    return found[0]


def _num_seeds(layout: Layout, asked: PlanConfig) -> int:
    """Plain decoding for callers who ask again has no luck in it, so one seed says all."""
    lucky = layout.policy != OFF.name or asked.requests_per_second is not None
    return asked.num_seeds if lucky else 1


def _work(run: Run, asked: PlanConfig) -> float:
    """How long a run takes, in units of its own."""
    drafting = 1.0 if run.layout.policy == OFF.name else _WORK_OF_DRAFTING
    return run.size(asked)[1] * asked.output_tokens * drafting


def _check_size(run: Run, asked: PlanConfig) -> None:
    tokens = run.tokens(asked)
    if tokens > MOST_TOKENS:
        _, requests = run.size(asked)
        key = "requests" if requests == asked.requests else "concurrency"
        raise ConfigError(
            f"plan.{key}: {requests:,} requests of {asked.prompt_tokens} prompt and "
            f"{asked.output_tokens} output tokens would be simulated for {run.layout.name}, "
            f"{tokens:,} tokens; expected at most {MOST_TOKENS:,}: give fewer callers, fewer "
            "requests or fewer simulated_groups"
        )


def _simulated(runs: Sequence[Run], asked: PlanConfig, jobs: int) -> Iterator[tuple[Run, Outcome]]:
    """Simulate each run, in order."""
    simulate = partial(simulate_run, asked=asked)
    if min(jobs, len(runs)) == 1:
        yield from ((run, simulate(run)) for run in runs)
        return
    # The pool's processes end with this one, whatever ends it. Ctrl-C should reach only this one.
    ignore = (signal.SIGINT, signal.SIG_IGN)
    with get_context("spawn").Pool(min(jobs, len(runs)), signal.signal, ignore) as pool:
        yield from zip(runs, pool.imap(simulate, runs), strict=True)


def _compared(planned: Sequence[PlannedLayout]) -> Iterator[PlannedLayout]:
    """Compare each layout with the fastest plain decoding on the same hosts under its load."""

    def place(one: PlannedLayout) -> tuple[str, int | None]:
        rental = one.layout.rental
        return (rental.name if rental else one.layout.target.name, one.callers)

    plain: dict[tuple[str, int | None], list[PlannedLayout]] = defaultdict(list)
    for one in planned:
        if one.layout.policy == OFF.name:
            plain[place(one)].append(one)
    for one in planned:
        beside = max(plain[place(one)], key=lambda each: each.tokens_per_second)
        yield replace(
            one,
            speedup=one.tokens_per_second / beside.tokens_per_second,
            per_gpu_gain=one.tokens_per_second_per_gpu / beside.tokens_per_second_per_gpu,
        )

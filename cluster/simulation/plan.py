"""`paceline plan`: which layouts a question allows, and what each comes to under its load."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context

from cluster.config_model import Config
from cluster.decoding.policies import PolicyName, policy_named
from cluster.plan_config import PlanConfig
from cluster.simulation.closed_forms import best_lockstep_window
from cluster.simulation.figures import Course, Figures, course_of, figures_of
from cluster.simulation.fleet import Fleet
from cluster.simulation.layout import Layout, Load
from cluster.simulation.target import BLOCK_SIZE
from paceline.errors import ConfigError
from paceline.text import counted
from workers.emulated.profiles import DeviceProfile, LinkProfile, load_profile
from workers.emulated.replay_text import Guess
from workers.engine.block_pool import blocks_for

DEFAULT_CONCURRENCY = 8
"""Callers for each target group of plain decoding, where the load is left open."""
KEEPS_UP = 0.95
"""Of the requests that arrive, so many must be answered meanwhile."""
GROUPS_OF_A_ROUTER = 8
"""A router gives requests to so many target groups; beyond that there are more routers, and
callers are dealt to them evenly."""
GENERATIONS = 4
"""So many requests at least are simulated for each caller, of fewer groups where need be: less than
two of them are measured."""
FASTER = 1.02
"""Below this ratio, one layout is no faster than another."""


@dataclass(frozen=True, slots=True)
class PlannedLayout:
    """A layout, the load that was simulated on a part of it, and the figures.

    `scale`: by how much the whole load is larger than the simulated part; rates in `figures` are
    the part's. `processor_seconds`: that the simulation took. `speedup` and `per_gpu_gain`: against
    plain decoding on the same kind of target.
    """

    layout: Layout
    simulated_groups: int
    scale: float
    figures: Figures
    same_text: bool
    keeps_up: bool
    processor_seconds: float
    speedup: float = 1.0
    per_gpu_gain: float = 1.0

    @property
    def tokens_per_second(self) -> float:
        """Of all its groups together."""
        return self.figures.tokens_per_second * self.scale

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """By the GPUs that it occupies."""
        return self.tokens_per_second / self.layout.gpus

    @property
    def faster_but_worse_per_gpu(self) -> bool:
        """Whether it buys speed with GPUs that plain decoding would make more of."""
        return self.speedup > FASTER and self.per_gpu_gain < 1


def make_plan(config: Config, *, tell: Callable[[str], None], jobs: int = 1) -> list[PlannedLayout]:
    """Simulate every layout; the best first: those that keep up, then by tokens/s, where all tokens
    that are asked for are served by latency. Raises ConfigError when none fits the hosts, or no
    request the KV.

    `jobs`: so many layouts at a time, each in a process of its own. The figures are the same.
    """
    asked = config.plan
    layouts = list(_layouts(config))
    if not layouts:
        raise ConfigError(
            f"plan.target: none of {', '.join(asked.target)} fits {counted(asked.hosts, 'host')} "
            f"of {asked.gpus_per_host} GPUs; give more hosts or another target"
        )
    _check_policies(asked, {layout.policy for layout in layouts})
    least = blocks_for(asked.prompt_tokens + asked.output_tokens, BLOCK_SIZE) * BLOCK_SIZE
    if asked.kv_tokens < least:
        raise ConfigError(
            f"plan.kv_tokens: expected at least {least} for requests of {asked.prompt_tokens} "
            f"prompt and {asked.output_tokens} output tokens, got {asked.kv_tokens}; give more KV, "
            "or fewer prompt_tokens or output_tokens"
        )
    concurrency = callers_of(asked, layouts)
    tell(f"simulating {counted(len(layouts), 'layout')}")
    planned = []
    for number, one in enumerate(_simulated(layouts, asked, concurrency, jobs), start=1):
        tell(f"simulated {number} of {len(layouts)}: {one.layout.name}")
        planned.append(one)
    planned = _compared(planned)
    served = asked.requests_per_second is not None
    return sorted(
        planned,
        key=lambda one: (
            not one.keeps_up,
            one.figures.token_ms[0] if served and one.keeps_up else -one.tokens_per_second,
        ),
    )


def callers_of(asked: PlanConfig, layouts: Iterable[Layout]) -> int:
    """Callers in all, the same for each layout; of no consequence where requests come at random."""
    if asked.concurrency is not None:
        return asked.concurrency
    return DEFAULT_CONCURRENCY * max(layout.groups for layout in layouts)


def _check_policies(asked: PlanConfig, planned: Collection[PolicyName]) -> None:
    """Refuse a policy that was asked for by name and that no ratio can have."""
    if "policies" not in asked.model_fields_set:
        return
    for name in asked.policies:
        if PolicyName(name) not in planned and name != PolicyName.OFF.value:
            needs = policy_named(PolicyName(name)).needs
            groups = f"{needs.groups} or more target groups and " if needs.groups > 1 else ""
            raise ConfigError(
                f"plan.policies: no layout can have {name!r}, which needs {groups}"
                f"{max(1, needs.drafters)} or more drafters: none of the ratios "
                f"{', '.join(asked.ratios)} has them within "
                f"{counted(asked.hosts * asked.gpus_per_host, 'GPU')}; give another ratio or more"
            )


def _layouts(config: Config) -> Iterator[Layout]:
    asked = config.plan
    for target_name in asked.target:
        target = load_profile(target_name, role="target")
        most_groups = _groups_that_fit(target, asked)
        if most_groups:
            yield _layout(config, target, PolicyName.OFF, cells=most_groups)
        for drafter_name in asked.drafter:
            drafter = load_profile(drafter_name, role="drafter")
            for ratio in asked.ratios:
                targets, drafters = map(int, ratio.split(":"))
                gpus = targets * target.gpus + drafters * drafter.gpus
                cells = min(most_groups // targets, asked.hosts * asked.gpus_per_host // gpus)
                for name in asked.policies:
                    policy = PolicyName(name)
                    needs = policy_named(policy).needs
                    enough = drafters >= needs.drafters and targets >= needs.groups
                    if cells and enough and policy is not PolicyName.OFF:
                        shared = needs.groups > 1  # by one driver, which has its groups share
                        yield replace(
                            _layout(config, target, policy, cells=cells, drafter=drafter),
                            targets=1 if shared else targets,
                            replicas=targets if shared else 1,
                            drafters=drafters,
                        )


def _groups_that_fit(target: DeviceProfile, asked: PlanConfig) -> int:
    """Target groups, each on whole shares of as many hosts as its profile says."""
    on_each = target.gpus // target.hosts
    return asked.hosts // target.hosts * (asked.gpus_per_host // on_each)


def _layout(
    config: Config,
    target: DeviceProfile,
    policy: PolicyName,
    *,
    cells: int,
    drafter: DeviceProfile | None = None,
) -> Layout:
    asked, speculation = config.plan, config.speculation
    window = speculation.window
    if policy is PolicyName.LOCKSTEP and drafter is not None:
        window = best_lockstep_window(
            asked.acceptance,
            step_ms=target.pass_ms.ms(1, 1),
            draft_ms=drafter.pass_ms.ms(1, 1),
            rtt_ms=asked.rtt_ms,
        )
    return Layout(
        target=target,
        policy=policy,
        window=window,
        drafter=drafter,
        cells=cells,
        branches=1 if policy_named(policy).needs.chains_only else speculation.branches,
        link=LinkProfile(rtt_ms=asked.rtt_ms, mbit_per_second=asked.mbit_per_second),
        max_num_seqs=config.target.max_num_seqs,
        wait_ms=speculation.wait_ms,
        kv_blocks=asked.kv_tokens // BLOCK_SIZE,
        prefix_cache=config.target.prefix_cache,
    )


def _simulated(
    layouts: Sequence[Layout], asked: PlanConfig, concurrency: int, jobs: int
) -> Iterator[PlannedLayout]:
    """Each of them, in their order."""
    simulate = partial(_simulate, asked=asked, concurrency=concurrency)
    if min(jobs, len(layouts)) == 1:
        yield from map(simulate, layouts)
        return
    # Whatever ends this one ends them too; Ctrl-C is for this one alone.
    ignore = (signal.SIGINT, signal.SIG_IGN)
    with get_context("spawn").Pool(min(jobs, len(layouts)), signal.signal, ignore) as pool:
        yield from pool.imap(simulate, layouts)


def _simulate(layout: Layout, asked: PlanConfig, concurrency: int) -> PlannedLayout:
    """Simulate some of its cells with their part of the load."""
    begin = time.process_time()
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
        time.process_time() - begin,
    )


def _keeps_up(course: Course) -> bool:
    """Whether requests that come at random are answered about as fast as they come.

    By those that came, not by how many should have: of a hundred, luck alone makes a tenth.
    """
    begin, end = course.begin, course.end
    seconds = course.seconds if begin.time else max(one.arrived for one in course.answered)
    return course.rate("answered") * seconds >= KEEPS_UP * (end.asked - begin.asked)


def _parts(layout: Layout, load: Load) -> Iterator[tuple[Layout, Load]]:
    """The layout in parts that share nothing, each with a router and its part of the load."""
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
    """Look for garbage in cycles seldom: there is little of it beside much that lives on."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def _compared(planned: Sequence[PlannedLayout]) -> list[PlannedLayout]:
    """Each beside plain decoding on the same kind of target."""
    plain = {one.layout.target.name: one for one in planned if one.layout.policy is PolicyName.OFF}
    found = []
    for one in planned:
        beside = plain[one.layout.target.name]
        found.append(
            replace(
                one,
                speedup=one.tokens_per_second / beside.tokens_per_second,
                per_gpu_gain=one.tokens_per_second_per_gpu / beside.tokens_per_second_per_gpu,
            )
        )
    return found

"""`paceline plan`: the layouts that a question allows, and their figures under its load."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import get_context

from cluster.config.model import Config, PlanConfig
from cluster.decoding.policies.off import OFF
from cluster.decoding.policy import LookaheadPolicy, policy_named
from cluster.simulation.closed_forms import best_lockstep_window
from cluster.simulation.layout import Layout
from cluster.simulation.target import BLOCK_SIZE
from cluster.simulation.trial import PlannedLayout, simulate_layout
from paceline.errors import ConfigError
from paceline.text import counted
from workers.emulated.profiles import DeviceProfile, LinkProfile, load_profile
from workers.engine.kv_blocks import blocks_for

DEFAULT_CONCURRENCY = 8
"""Callers for each target group of plain decoding, if no load is given."""


def make_plan(config: Config, *, tell: Callable[[str], None], jobs: int = 1) -> list[PlannedLayout]:
    """Simulate every layout. The best comes first.

    Layouts that keep up come first, by tokens/s; under a fixed rate of requests by latency. Raises
    ConfigError if no layout fits the hosts, or no request the KV. `jobs`: layouts to simulate at a
    time, each in a process of its own. The figures do not depend on it.
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
        speed = f"{one.tokens_per_second:,.0f} tokens/s"
        tell(f"simulated {number} of {len(layouts)}: {one.layout.name}: {speed}")
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
    """Callers in total, the same for each layout. Unused if requests come at random."""
    if asked.concurrency is not None:
        return asked.concurrency
    return DEFAULT_CONCURRENCY * max(layout.groups for layout in layouts)


def _check_policies(asked: PlanConfig, planned: Collection[str]) -> None:
    """Refuse a policy that was asked for by name but that no ratio allows."""
    if "policies" not in asked.model_fields_set:
        return
    for name in asked.policies:
        policy = policy_named(name)
        if name not in planned and policy.drafts:
            needs = policy.needs
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
            yield _layout(config, target, OFF, cells=most_groups)
        for drafter_name in asked.drafter:
            drafter = load_profile(drafter_name, role="drafter")
            for ratio in asked.ratios:
                targets, drafters = map(int, ratio.split(":"))
                gpus = targets * target.gpus + drafters * drafter.gpus
                cells = min(most_groups // targets, asked.hosts * asked.gpus_per_host // gpus)
                for name in asked.policies:
                    policy = policy_named(name)
                    needs = policy.needs
                    enough = drafters >= needs.drafters and targets >= needs.groups
                    if cells and enough and policy.drafts:
                        shared = needs.groups > 1  # One driver owns all groups and shares them.
                        yield replace(
                            _layout(config, target, policy, cells=cells, drafter=drafter),
                            targets=1 if shared else targets,
                            replicas=targets if shared else 1,
                            drafters=drafters,
                        )


def _groups_that_fit(target: DeviceProfile, asked: PlanConfig) -> int:
    """Target groups that fit. Each takes whole shares of as many hosts as its profile says."""
    on_each = target.gpus // target.hosts
    return asked.hosts // target.hosts * (asked.gpus_per_host // on_each)


def _layout(
    config: Config,
    target: DeviceProfile,
    policy: LookaheadPolicy,
    *,
    cells: int,
    drafter: DeviceProfile | None = None,
) -> Layout:
    asked, speculation = config.plan, config.speculation
    window = speculation.window
    if drafter is not None and not policy.drafting_is_free:
        window = best_lockstep_window(
            asked.acceptance,
            step_ms=target.pass_ms.ms(1, 1),
            draft_ms=drafter.pass_ms.ms(1, 1),
            rtt_ms=asked.rtt_ms,
        )
    return Layout(
        target=target,
        policy=policy.name,
        window=window,
        drafter=drafter,
        cells=cells,
        branches=1 if policy.needs.chains_only else speculation.branches,
        link=LinkProfile(rtt_ms=asked.rtt_ms, mbit_per_second=asked.mbit_per_second),
        max_num_seqs=config.target.max_num_seqs,
        wait_ms=speculation.wait_ms,
        kv_blocks=asked.kv_tokens // BLOCK_SIZE,
        prefix_cache=config.target.prefix_cache,
    )


def _simulated(
    layouts: Sequence[Layout], asked: PlanConfig, concurrency: int, jobs: int
) -> Iterator[PlannedLayout]:
    """Simulate each layout, in order."""
    simulate = partial(simulate_layout, asked=asked, concurrency=concurrency)
    if min(jobs, len(layouts)) == 1:
        yield from map(simulate, layouts)
        return
    # The pool's processes end with this one, whatever ends it. Ctrl-C should reach only this one.
    ignore = (signal.SIGINT, signal.SIG_IGN)
    with get_context("spawn").Pool(min(jobs, len(layouts)), signal.signal, ignore) as pool:
        yield from pool.imap(simulate, layouts)


def _compared(planned: Sequence[PlannedLayout]) -> list[PlannedLayout]:
    """Compare each layout with plain decoding on the same kind of target."""
    plain = {one.layout.target.name: one for one in planned if one.layout.policy == OFF.name}
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

"""`paceline plan`: simulates layouts before you rent them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import make_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from cluster.config.plan_question import PlanConfig
from cluster.decoding.policy import POLICIES
from cluster.simulation.layout import Layout
from cluster.simulation.plan_answer import Plan, meets_targets
from cluster.simulation.trial import FASTER, PlannedLayout
from deploy.cli.reach import LONG_WORK_SECONDS, teller
from deploy.rows.outputs import check_writable, write_json, write_text
from deploy.terminal.lines import fact, table_of, whole_table
from deploy.terminal.options import ConfigOption, JsonOption, check_at_least_one
from paceline.errors import InvalidRequestError
from paceline.text import counted
from workers.emulated.latency_profiles import DeviceProfile

_AGAIN = "Repeat the flag to give several."
_KEYS: Mapping[str, tuple[Any, str]] = {
    "target": (list[str], f"Latency profile, such as 8b-h100. Default: 70b-4xh100. {_AGAIN}"),
    "drafter": (list[str], f"Latency profile, such as 0.5b-h100. Default: 1b-h100. {_AGAIN}"),
    "hosts": (int, "Number of hosts. Default: 1."),
    "gpus_per_host": (int, "GPUs of each host. Default: 8."),
    "ratios": (
        list[str],
        f"Target groups to the drafters that they share, such as 1:1 or 4:1. {_AGAIN}",
    ),
    "policies": (list[str], f"Of {', '.join(POLICIES)}; default: all. {_AGAIN}"),
    "rtt_ms": (float, "Round trip between driver and drafter, in ms. Default: 0.1."),
    "mbit_per_second": (float, "Bandwidth of that link; 0: no bound."),
    "acceptance": (float, "Share of drafted tokens that are right. Default: 0.8."),
    "hit_rate": (float, "Share of wrong first guesses whose second guess is right."),
    "concurrency": (list[int], f"Callers that ask again as soon as they are answered. {_AGAIN}"),
    "requests_per_second": (float, "Requests that arrive at random, instead of callers."),
    "prompt_tokens": (int, "Tokens of each prompt. Default: 512."),
    "output_tokens": (int, "Tokens of each answer. Default: 128."),
    "kv_tokens": (int, "Tokens whose KV a target group holds. Default: 131072."),
    "requests": (int, "Requests simulated for each layout. Default: 100."),
    "simulated_groups": (int, "Maximum target groups to simulate; 0: all. Default: 4."),
    "seed": (int, "Seed of the simulated randomness. Default: 0."),
    "seeds": (int, "Simulations of each layout, for error bars. Default: 1; rent: 3."),
}
"""Keys of the table [plan] that have flags: the type of each, and its help."""
PlanFlags = make_dataclass(
    "PlanFlags",
    [
        (key, Annotated[kind | None, typer.Option(help=says)], None)
        for key, (kind, says) in _KEYS.items()
    ],
)


def plan(
    environ: Mapping[str, str],
    *,
    config_path: ConfigOption = None,
    keys: PlanFlags,  # type: ignore[valid-type]  # made from the table
    jobs: Annotated[
        int | None,
        typer.Option(help="Layouts simulated at a time. Default: the number of cores."),
    ] = None,
    json_path: JsonOption = None,
    toml_path: Annotated[
        Path | None,
        typer.Option("--toml", help="Write the chosen layout's configuration to this file."),
    ] = None,
    values_path: Annotated[
        Path | None,
        typer.Option("--values", help="Write the chosen layout's Helm values to this file."),
    ] = None,
) -> None:
    """Simulate layouts and policies: tokens/s, per GPU, latency, and where the time goes.

    Flags override the keys of the same names in the configuration's table "plan". Hosts to
    rent, with cards and prices, are its table "plan.rent".
    docs/planning.md says what is simulated, and how accurately.
    """
    check_at_least_one("jobs", jobs)
    files = {"json": json_path, "toml": toml_path, "values": values_path}
    for flag, path in files.items():
        if path is not None:
            check_writable(flag, path)
    from cluster.config.load import Flag, load_config
    from cluster.simulation.plan_answer import make_plan
    from deploy.cli.chosen_layout import check_choosable, toml_of, values_of

    flags = [
        Flag(f"--{key.replace('_', '-')}", "plan", key, value)
        for key, value in vars(keys).items()
        if value is not None
    ]
    config = load_config(config_path, environ, flags=flags)
    for flag, path in (("toml", toml_path), ("values", values_path)):
        if path is not None:
            check_choosable(flag, config)
    begin, started = _processor_seconds(), time.monotonic()
    with teller(Console(stderr=True), every=LONG_WORK_SECONDS) as tell:

        def progress(message: str, done: float) -> None:
            spent = time.monotonic() - started
            left = f"; about {spent / done - spent:.0f} s left" if 0 < done < 1 else ""
            tell(message + left)

        planned = make_plan(config, tell=progress, jobs=jobs or len(os.sched_getaffinity(0)))
    seconds = _processor_seconds() - begin
    print_plan(Console(), config.plan, planned)
    typer.echo(f"Simulated in {seconds:.1f} s of one core.")
    if json_path is not None:
        document = plan_json(config.plan, planned)
        write_json(json_path, document | {"processor_seconds": seconds})
    if planned.chosen is not None:
        if toml_path is not None:
            write_text(toml_path, toml_of(config, planned.chosen), flag="toml")
        if values_path is not None:
            write_text(values_path, values_of(config, planned.chosen), flag="values")
    elif toml_path is not None or values_path is not None:
        raise InvalidRequestError(
            "values" if toml_path is None else "toml",
            "no layout meets the targets, so none is chosen; give more hosts, fewer callers, "
            "or other targets",
        )


def _processor_seconds() -> float:
    """Processor time of this process and of its children that have ended."""
    return sum(os.times()[:4])


_WIDTH_OF_A_FILE = 100
_SIMULATED = """
SIMULATED: the scheduler and the drafters' trees are real, devices and links are latency profiles;
nothing was measured on a GPU."""
LEGEND = f"""{_SIMULATED} /off: tokens/s over plain decoding on the same hosts. first, token:
ms to the first token, and ms a token after it; median and 99th percentile of requests. target:
share of time in steps, waiting although there are requests, and idle. drafter: share of time in
passes. len: tokens a step. used: share of the drafted tokens that was used.
"""
LEGEND_OF_RENT = f"""{_SIMULATED} Prices are those of the file. GPUs: used of those paid for.
+-: half the distance of the lowest and the highest seed. /GPU: tokens/s over all GPUs. /off:
tokens/s over the best plain decoding on all the same GPUs. first, token: ms to the first token, and
ms a token after it; median and 95th percentile of requests. target: share of time in steps, waiting
although there are requests, and idle. drafter: share of time in passes. len: tokens a step.
"""


def plan_json(asked: PlanConfig, plan: Plan) -> dict[str, object]:
    """The document of `paceline plan --json`."""
    chosen = plan.chosen
    return {
        "simulated": True,
        "plan": asked.model_dump(mode="json"),
        "callers": sorted({one.callers for one in plan.rows if one.callers is not None}),
        "profiles": [
            {"name": profile.name, "role": profile.role, "source": profile.source.strip()}
            for profile in _profiles(plan.rows)
        ],
        "skipped": [
            {"layout": one.layout, "what": one.what, "why": one.why} for one in plan.skipped
        ],
        "chosen": chosen and {"name": chosen.layout.name, "callers": chosen.callers},
        "rows": [_row(one, asked, _of_load(one, plan)) for one in plan.rows],
    }


def print_plan(console: Console, asked: PlanConfig, plan: Plan) -> None:
    """Print the layouts by name, the best first, then their figures, a table for each load."""
    if not console.is_terminal:
        console = Console(file=console.file, width=_WIDTH_OF_A_FILE)
    console.print(_question(asked, plan), highlight=False)
    loads = list(dict.fromkeys(one.callers for one in plan.rows))
    numbers: dict[int, int] = {}
    shown = [one for one in plan.rows if _is_shown(one, plan)]
    for one in shown:
        if id(one.layout) not in numbers:
            number = numbers[id(one.layout)] = len(numbers) + 1
            notes = "; ".join(_notes(one, asked, plan.rows)) if len(loads) == 1 else ""
            fact(console, f"{number:>3} ", f"{one.layout.name}{f': {notes}' if notes else ''}")
    for skipped in plan.skipped:
        line = f"left out: {skipped.layout}: {skipped.what} {skipped.why}"
        console.print(line, highlight=False, markup=False)
    for load in loads:
        rows = [one for one in shown if one.callers == load]
        console.print()
        if load is not None and len(loads) > 1:
            console.print(f"{counted(load, 'caller')}:", highlight=False)
        whole_table(
            console, _table(rows, asked, numbers), optional=("used", "+-", "len", "drafter")
        )
        for one in rows if len(loads) > 1 else ():
            if notes := "; ".join(_notes(one, asked, rows)):
                fact(console, f"{numbers[id(one.layout)]:>3} ", notes)
    if any(one.simulated_groups < one.layout.groups for one in plan.rows):
        most = max(one.simulated_groups for one in plan.rows)
        console.print(
            f"Of larger layouts at most {counted(most, 'target group')} are simulated, with their "
            "part of the load.",
            highlight=False,
        )
    console.print(LEGEND_OF_RENT if asked.rent else LEGEND, highlight=False, markup=False)
    if asked.rent is not None:
        console.print(_to_rent(plan, asked, numbers), highlight=False, markup=False)


def _is_shown(one: PlannedLayout, plan: Plan) -> bool:
    """Of the ways to decode plainly on hosts to rent, only the best are shown."""
    if one.layout.rental is None or one.layout.drafter is not None:
        return True
    return one.speedup >= 1 or one is plan.chosen or one is _of_load(one, plan)[0]


def _question(asked: PlanConfig, plan: Plan) -> str:
    where = f"{asked.hosts} x {asked.gpus_per_host} GPUs"
    if asked.rent is not None:
        where = f"{asked.rent.target} with {asked.rent.drafter}"
    return (
        f"{where}, {_load(asked, plan)}, {asked.prompt_tokens} prompt "
        f"and {asked.output_tokens} output tokens, acceptance {asked.acceptance:g}, "
        f"rtt {asked.rtt_ms:g} ms"
    )


def _table(rows: Sequence[PlannedLayout], asked: PlanConfig, numbers: dict[int, int]) -> Table:
    cells = [dict(_cells(one, asked)) for one in rows]
    table = table_of((), ("", *cells[0]))
    for one, found in zip(rows, cells, strict=True):
        table.add_row(str(numbers[id(one.layout)]), *found.values())
    return table


def _cells(one: PlannedLayout, asked: PlanConfig) -> Iterator[tuple[str, str]]:
    """The headings and cells of a row."""
    figures, rent = one.figures, asked.rent
    there = one.layout.gpus if rent else asked.hosts * asked.gpus_per_host
    yield "GPUs", f"{one.layout.used_gpus}/{there}"
    yield "tok/s", f"{one.tokens_per_second:.0f}"
    if asked.num_seeds > 1:
        low, high = one.tokens_per_second_range
        half = (high - low) / 2
        yield "+-", f"{half:.{0 if half >= 1 else 1}f}" if len(one.outcomes) > 1 else ""
    yield "/GPU", f"{one.tokens_per_second_per_gpu:.1f}"
    yield "/off", f"{one.speedup:.2f}"
    for heading, found in (("first", figures.ttft_ms), ("token", figures.token_ms)):
        median, high = found.p50, found.p95 if rent else found.p99
        shown = f"{median:.0f} {high:.0f}" if median >= 100 else f"{median:.1f} {high:.1f}"
        yield heading, shown
    if rent and one.cost_per_million is not None:
        yield f"{rent.currency}/M", f"{one.cost_per_million:.2f}"
    target = figures.target
    yield "target", " ".join(f"{share:.0%}" for share in (target.busy, target.waiting, target.idle))
    yield "drafter", "" if figures.drafter_busy is None else f"{figures.drafter_busy:.0%}"
    yield "len", f"{figures.acceptance_length:.2f}"
    if not rent:
        yield "used", "" if figures.draft_used is None else f"{figures.draft_used:.0%}"


def _to_rent(plan: Plan, asked: PlanConfig, numbers: dict[int, int]) -> str:
    one, rent = plan.chosen, asked.rent
    assert rent is not None
    if one is None:
        return "To rent: nothing here meets the targets.\n"
    cost, load = one.cost_per_million, ""
    if one.callers is not None:
        load = f" for {counted(one.callers, 'caller')}"
    best = f"{one.tokens_per_second_per_gpu:.1f} tokens/s a GPU"
    if cost is not None:
        best = f"{rent.currency} {cost:.2f} a million tokens, {best}"
    return (
        f"To rent{load}: {numbers[id(one.layout)]}, {one.layout.name}: {best}, "
        f"{one.speedup:.2f} of plain decoding on the same GPUs, "
        f"{one.figures.token_ms.p95:.1f} ms a token (95th percentile). Simulated.\n"
    )


def _row(
    one: PlannedLayout, asked: PlanConfig, beside: Sequence[PlannedLayout]
) -> dict[str, object]:
    layout, figures = one.layout, one.figures
    rental = layout.rental
    return {
        "name": layout.name,
        "callers": one.callers,
        "policy": layout.policy,
        "window": layout.window,
        "target": layout.target.name,
        "targets_beside": [part.target.name for part in layout.beside],
        "drafter": None if layout.drafter is None else layout.drafter.name,
        "target_groups": layout.groups,
        "drafters": layout.cells * layout.drafters,
        "rental": None if rental is None else rental.name,
        "price_per_hour": None if rental is None else rental.price_per_hour,
        "cost_per_million": one.cost_per_million,
        "gpus": layout.gpus,
        "used_gpus": layout.used_gpus,
        "simulated_groups": one.simulated_groups,
        "requests": figures.requests,
        "tokens_per_second": one.tokens_per_second,
        "tokens_per_second_range": list(one.tokens_per_second_range),
        "tokens_per_second_per_gpu": one.tokens_per_second_per_gpu,
        "speedup": one.speedup,
        "per_gpu_gain": one.per_gpu_gain,
        "faster_but_worse_per_gpu": one.faster_but_worse_per_gpu,
        "keeps_up": one.keeps_up,
        "meets_targets": meets_targets(one, asked),
        "ttft_ms": figures.ttft_ms._asdict(),
        "token_ms": figures.token_ms._asdict(),
        "token_ms_range": list(one.token_ms_range),
        "seeds": len(one.outcomes),
        "acceptance_length": figures.acceptance_length,
        "target_busy": figures.target.busy,
        "target_prefill": figures.target.prefill,
        "target_waiting": figures.target.waiting,
        "target_idle": figures.target.idle,
        "drafter_busy": figures.drafter_busy,
        "draft_used": figures.draft_used,
        "same_text": one.same_text,
        "notes": list(_notes(one, asked, beside)),
    }


def _notes(one: PlannedLayout, asked: PlanConfig, beside: Sequence[PlannedLayout]) -> Iterator[str]:
    """What is to be said about a row. `beside`: all rows of its load."""
    if one is beside[0]:
        yield "best"
    if one is max(beside, key=lambda each: each.tokens_per_second_per_gpu):
        yield "most tokens/s per GPU"
    if one.faster_but_worse_per_gpu:
        yield f"faster than off, but {1 - one.per_gpu_gain:.0%} worse per GPU"
    if one.speedup < 1 / FASTER and not (asked.rent and one.layout.drafter is None):
        yield "slower than off"
    if not one.keeps_up:
        yield "does not keep up with the load"
    elif not meets_targets(one, asked):
        yield "misses the targets"
    if not one.same_text:
        yield "NOT THE SAME TEXT"


def _of_load(one: PlannedLayout, plan: Plan) -> list[PlannedLayout]:
    return [each for each in plan.rows if each.callers == one.callers]


def _load(asked: PlanConfig, plan: Plan) -> str:
    if asked.requests_per_second is not None:
        return f"{asked.requests_per_second:g} requests/s"
    loads = sorted({one.callers for one in plan.rows if one.callers is not None})
    if len(loads) == 1:
        return counted(loads[0], "caller")
    return f"{', '.join(map(str, loads))} callers"


def _profiles(planned: Sequence[PlannedLayout]) -> Iterator[DeviceProfile]:
    found: dict[str, DeviceProfile] = {}

    def note(layout: Layout) -> None:
        for profile in (layout.target, layout.drafter):
            if profile is not None:
                found[profile.name] = profile
        for part in layout.beside:
            note(part)

    for one in planned:
        note(one.layout)
    yield from found.values()

"""`paceline plan`: simulates layouts before you rent them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import make_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cluster.decoding.policy import POLICIES
from deploy.cli.reach import LONG_WORK_SECONDS, teller
from deploy.rows.outputs import check_writable, write_json, write_text
from deploy.terminal.options import ConfigOption, JsonOption, check_at_least_one
from paceline.errors import InvalidRequestError

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
    from cluster.simulation.plan import make_plan
    from deploy.cli.chosen_layout import check_choosable, toml_of, values_of
    from deploy.cli.plan_report import plan_json, print_plan

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

"""`paceline plan`: simulates layouts before you rent them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.decoding.policy import POLICIES
from deploy.cli.options import ConfigOption, JsonOption, check_at_least_one
from deploy.cli.reach import LONG_WORK_SECONDS, teller
from deploy.rows.outputs import check_writable, write_json, write_text
from paceline.errors import InvalidRequestError

_AGAIN = "Repeat the flag to give several."


def plan(
    environ: Mapping[str, str],
    config_path: ConfigOption = None,
    target: Annotated[
        list[str] | None,
        typer.Option(help=f"Latency profile, such as 8b-h100. Default: 70b-4xh100. {_AGAIN}"),
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(help=f"Latency profile, such as 0.5b-h100. Default: 1b-h100. {_AGAIN}"),
    ] = None,
    hosts: Annotated[int | None, typer.Option(help="Number of hosts. Default: 1.")] = None,
    gpus_per_host: Annotated[
        int | None, typer.Option(help="GPUs of each host. Default: 8.")
    ] = None,
    ratios: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Target groups to the drafters that they share, such as 1:1 or 4:1. {_AGAIN}"
        ),
    ] = None,
    policies: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(POLICIES)}; default: all. {_AGAIN}")
    ] = None,
    rtt_ms: Annotated[
        float | None,
        typer.Option(help="Round trip between driver and drafter, in ms. Default: 0.1."),
    ] = None,
    mbit_per_second: Annotated[
        float | None, typer.Option(help="Bandwidth of that link; 0: no bound.")
    ] = None,
    acceptance: Annotated[
        float | None,
        typer.Option(help="Share of drafted tokens that are right. Default: 0.8."),
    ] = None,
    hit_rate: Annotated[
        float | None,
        typer.Option(help="Share of wrong first guesses whose second guess is right."),
    ] = None,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(help=f"Callers that ask again as soon as they are answered. {_AGAIN}"),
    ] = None,
    requests_per_second: Annotated[
        float | None, typer.Option(help="Requests that arrive at random, instead of callers.")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(help="Tokens of each prompt. Default: 512.")
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option(help="Tokens of each answer. Default: 128.")
    ] = None,
    kv_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens whose KV a target group holds. Default: 131072."),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help="Requests simulated for each layout. Default: 100.")
    ] = None,
    simulated_groups: Annotated[
        int | None,
        typer.Option(help="Maximum target groups to simulate; 0: all. Default: 4."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the simulated randomness. Default: 0.")
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(help="Simulations of each layout, for error bars. Default: 1; rent: 3."),
    ] = None,
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
    given = {
        "target": target,
        "drafter": drafter,
        "hosts": hosts,
        "gpus_per_host": gpus_per_host,
        "ratios": ratios,
        "policies": policies,
        "rtt_ms": rtt_ms,
        "mbit_per_second": mbit_per_second,
        "acceptance": acceptance,
        "hit_rate": hit_rate,
        "concurrency": concurrency,
        "requests_per_second": requests_per_second,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "kv_tokens": kv_tokens,
        "requests": requests,
        "simulated_groups": simulated_groups,
        "seed": seed,
        "seeds": seeds,
    }
    from cluster.config.load import Flag, load_config
    from cluster.simulation.plan import make_plan
    from deploy.cli.chosen_layout import check_choosable, toml_of, values_of
    from deploy.cli.plan_report import plan_json, print_plan

    flags = [
        Flag(f"--{key.replace('_', '-')}", "plan", key, value)
        for key, value in given.items()
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

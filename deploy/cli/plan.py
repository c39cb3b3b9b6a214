"""`paceline plan`: simulates layouts before you rent them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated

import typer
from rich.console import Console

from cluster.decoding.policy import POLICIES
from deploy.cli.options import ConfigOption, JsonOption, check_at_least_one
from deploy.cli.reach import teller
from deploy.rows.outputs import check_writable, write_json

_AGAIN = "Repeat the flag to give several."


def add_commands(app: typer.Typer, environ: Mapping[str, str]) -> None:
    """Add `plan` to the command tree."""

    @app.command()
    def plan(
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
            int | None, typer.Option(help="Callers that ask again as soon as they are answered.")
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
        jobs: Annotated[
            int | None,
            typer.Option(help="Layouts simulated at a time. Default: the number of cores."),
        ] = None,
        json_path: JsonOption = None,
    ) -> None:
        """Simulate layouts and policies: tokens/s, per GPU, latency, and where the time goes.

        Flags override the keys of the same names in the configuration's table "plan".
        docs/planning.md says what is simulated, and how accurately.
        """
        check_at_least_one("jobs", jobs)
        if json_path is not None:
            check_writable("json", json_path)
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
        }
        from cluster.config.load import load_config
        from cluster.simulation.plan import make_plan
        from deploy.cli.plan_report import plan_json, print_plan

        flags = {key: value for key, value in given.items() if value is not None}
        config = load_config(config_path, environ, plan_flags=flags)
        begin = _processor_seconds()
        with teller(Console(stderr=True)) as tell:
            planned = make_plan(config, tell=tell, jobs=jobs or len(os.sched_getaffinity(0)))
        seconds = _processor_seconds() - begin
        print_plan(Console(), config.plan, planned)
        typer.echo(f"Simulated in {seconds:.1f} s of one core.")
        if json_path is not None:
            document = plan_json(config.plan, planned)
            write_json(json_path, document | {"processor_seconds": seconds})


def _processor_seconds() -> float:
    """Processor time of this process and of its children that have ended."""
    return sum(os.times()[:4])

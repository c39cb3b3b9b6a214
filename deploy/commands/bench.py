"""`paceline bench SUITE`: ratios measured in one run, with the peer beside us."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deploy.commands.options import ConfigOption, JsonOption
from deploy.inputs import DEFAULT_INPUT, BadRow, read_rows
from deploy.outputs import check_writable, write_json
from deploy.reach import teller
from deploy.request_flags import check_at_least_one
from paceline.errors import InvalidRequestError
from workers.models import default_home

SUITES = ("decode",)


def add_commands(app: typer.Typer, environ: Mapping[str, str]) -> None:
    """Add `bench` to the command tree."""

    @app.command()
    def bench(
        suite: Annotated[str, typer.Argument(help="decode.")],
        config_path: ConfigOption = None,
        input_path: Annotated[
            Path, typer.Option("--input", help="JSON lines. Default: our own prompts.")
        ] = DEFAULT_INPUT,
        limit: Annotated[int, typer.Option(help="First N rows only.")] = 8,
        max_tokens: Annotated[int, typer.Option(help="Most tokens a row.")] = 64,
        repeats: Annotated[int, typer.Option(help="How often each row is decoded.")] = 3,
        calibrate: Annotated[
            bool, typer.Option(help="Try windows and assistant settings; else the defaults.")
        ] = True,
        gap_steps: Annotated[
            int, typer.Option(help="Steps over which the gap between passes is taken.")
        ] = 1000,
        json_path: JsonOption = None,
    ) -> None:
        """Measure ratios: our rows and transformers', in turns, in one run."""
        from cluster.config import load_config

        if suite not in SUITES:
            raise InvalidRequestError("suite", f"expected {', '.join(SUITES)}, got {suite!r}")
        counts = {
            "limit": limit,
            "max-tokens": max_tokens,
            "repeats": repeats,
            "gap-steps": gap_steps,
        }
        for name, value in counts.items():
            check_at_least_one(name, value)
        if json_path is not None:
            check_writable("json", json_path)
        config = load_config(config_path, environ)
        rows = read_rows(input_path, limit=limit)
        inputs = []
        for row in rows:
            if isinstance(row, BadRow):
                raise InvalidRequestError("input", row.message)
            inputs.append(row.input)
        console = Console(stderr=True)

        from deploy.bench.decode import DecodeSettings, deployments, run_decode
        from deploy.bench.machine import describe_machine
        from deploy.bench.report import decode_json, print_decode

        settings = DecodeSettings(max_tokens, repeats, calibrate, gap_steps)
        configs = deployments(config)
        machine = describe_machine()
        with tempfile.TemporaryDirectory() as folder, teller(console) as tell:
            result = run_decode(
                configs,
                inputs,
                settings,
                home=default_home(environ),
                log_folder=Path(folder),
                tell=tell,
            )
        print_decode(Console(), result)
        if json_path is not None:
            write_json(json_path, decode_json(result, machine))

"""`paceline bench SUITE`: ratios measured in one run, with the peer beside us."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from deploy.commands import bench_suites
from deploy.commands.bench_suites import Amount, Task
from deploy.commands.options import ConfigOption, JsonOption
from deploy.inputs import DEFAULT_INPUT, BadRow, read_rows
from deploy.outputs import check_writable, write_json
from deploy.request_flags import check_at_least_one
from paceline.errors import InvalidRequestError
from paceline.generation import GenerateInput
from workers.models import default_home

AMOUNTS: Mapping[str, Amount] = {"decode": Amount(8, 64, 3), "rules": Amount(4, 32, 2)}
"""What the suites that read an input measure unless told otherwise: minutes on two cores."""
QUICK = Amount(2, 24, 1)
"""Of suite rules with --quick."""
SUITES = (*AMOUNTS, "engine", "lookahead")


def add_commands(app: typer.Typer, environ: Mapping[str, str]) -> None:
    """Add `bench` to the command tree."""

    @app.command()
    def bench(
        suite: Annotated[str, typer.Argument(help="decode, rules, engine or lookahead.")],
        config_path: ConfigOption = None,
        input_path: Annotated[
            Path, typer.Option("--input", help="JSON lines. Default: our own prompts.")
        ] = DEFAULT_INPUT,
        limit: Annotated[
            int | None, typer.Option(help="First N rows only. Default: 8; rules 4.")
        ] = None,
        max_tokens: Annotated[
            int | None,
            typer.Option(help="Most tokens a row. Default: 64; rules 32; lookahead 240."),
        ] = None,
        repeats: Annotated[
            int | None,
            typer.Option(help="How often a row is decoded. Default: 3; rules, lookahead 2."),
        ] = None,
        calibrate: Annotated[
            bool,
            typer.Option(
                help="decode: try windows and assistant settings first, at most a minute."
            ),
        ] = True,
        gap_steps: Annotated[
            int, typer.Option(help="decode: steps over which the gap between passes is taken.")
        ] = 1000,
        part: Annotated[
            list[str] | None,
            typer.Option(
                help="rules: time, acceptance, stopping or train-free; default all. engine: "
                "steps (5 minutes), serving (10), prefix (3), driver (4) or delay (2); default "
                "steps and serving; one that fails costs its own rows alone. lookahead: a policy, "
                "natural or dilated. May be repeated."
            ),
        ] = None,
        batch: Annotated[
            list[int] | None,
            typer.Option(
                help="engine: rows of this batch alone, of 1, 4, 16 and, in part driver, 64 and "
                "1000. May be repeated. Default: all."
            ),
        ] = None,
        quick: Annotated[
            bool,
            typer.Option(
                "--quick",
                help="engine: three minutes rather than 15. lookahead: at most two minutes rather "
                "than twenty, a cell of each policy. rules: some four rather than fifteen: "
                "2 rows of 24 tokens, once, and short windows in part time.",
            ),
        ] = False,
        device: Annotated[
            str,
            typer.Option(help="engine: cpu, or cuda for the GPU engine with a random 8 B model."),
        ] = "cpu",
        json_path: JsonOption = None,
    ) -> None:
        """Measure ratios in one run: ours in turns; decode, engine: transformers beside us."""
        from cluster.config import load_config

        if suite not in SUITES:
            raise InvalidRequestError(
                "suite", f"expected one of {', '.join(SUITES)}, got {suite!r}"
            )
        for name, value in (
            ("limit", limit),
            ("max-tokens", max_tokens),
            ("repeats", repeats),
            ("gap-steps", gap_steps),
        ):
            check_at_least_one(name, value)
        _check_parts(suite, part)
        _check_batches(suite, batch)
        if device not in ("cpu", "cuda"):
            raise InvalidRequestError("device", f"expected cpu or cuda, got {device!r}")
        if json_path is not None:
            check_writable("json", json_path)
        config, home = load_config(config_path, environ), default_home(environ)
        if suite == "engine" and device == "cuda":
            report = bench_suites.gpu(quick=quick, kernels=config.target.kernels)
        elif suite == "engine":
            report = bench_suites.engine(
                config, part, batch, quick=quick, home=home, json_path=json_path
            )
        elif suite == "lookahead":
            report = bench_suites.lookahead(
                part, max_tokens, repeats, quick=quick, home=home, json_path=json_path
            )
        else:
            if quick and suite != "rules":
                raise InvalidRequestError("quick", f"suite {suite} has no quick form")
            usual = QUICK if quick else AMOUNTS[suite]
            amount = _amount(usual, limit, max_tokens, repeats)
            task = Task(config, _read_inputs(input_path, amount.limit), amount, home)
            if suite == "decode":
                report = bench_suites.decode(task, calibrate=calibrate, gap_steps=gap_steps)
            else:
                report = bench_suites.rules(task, part, quick=quick)
        if json_path is not None:
            write_json(json_path, report)
        if report.get("failed"):
            raise typer.Exit(1)


def _amount(
    usual: Amount, limit: int | None, max_tokens: int | None, repeats: int | None
) -> Amount:
    return Amount(
        usual.limit if limit is None else limit,
        usual.max_tokens if max_tokens is None else max_tokens,
        usual.repeats if repeats is None else repeats,
    )


def _check_parts(suite: str, parts: Sequence[str] | None) -> None:
    if suite == "engine":
        from deploy.bench.engine import PARTS

        names = tuple(PARTS)
    elif suite == "lookahead":
        from deploy.bench.lookahead_cells import part_names

        names = part_names()
    else:
        from deploy.bench.rules_rows import PART_NAMES

        names = PART_NAMES
    for part in parts or ():
        if part not in names:
            raise InvalidRequestError("part", f"expected {', '.join(names)}, got {part!r}")


def _check_batches(suite: str, batches: Sequence[int] | None) -> None:
    from deploy.bench.engine import ALL_BATCHES

    if batches and suite != "engine":
        raise InvalidRequestError("batch", f"suite {suite} has no rows by batch")
    for batch in batches or ():
        if batch not in ALL_BATCHES:
            names = ", ".join(map(str, ALL_BATCHES))
            raise InvalidRequestError("batch", f"expected {names}, got {batch}")


def _read_inputs(path: Path, limit: int) -> list[GenerateInput]:
    inputs: list[GenerateInput] = []
    for row in read_rows(path, limit=limit):
        if isinstance(row, BadRow):
            raise InvalidRequestError("input", row.message)
        inputs.append(row.input)
    return inputs

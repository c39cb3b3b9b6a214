"""`paceline bench SUITE`: ratios measured in one run. Each suite is a file of deploy/bench."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from deploy.cli.reach import LONG_WORK_SECONDS, teller
from deploy.rows.inputs import BENCH_INPUTS, DEFAULT_INPUT
from deploy.rows.outputs import check_writable, write_json
from deploy.terminal.options import ConfigOption, JsonOption, check_at_least_one
from paceline.errors import InvalidRequestError
from workers.models.catalog import default_home

if TYPE_CHECKING:
    from deploy.bench.harness import Document, Suite


class _BenchCommand(TyperCommand):
    """The command `bench`. Its help ends with a list of the registered suites."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from deploy.bench.harness import suites

        lines = [self.help or ""]
        for suite in suites().values():
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(suite.flags))
            lines.append(f"{suite.name}: {suite.about}. It takes {flags}.")
        self.help = "\n\n".join(lines)
        super().format_help(ctx, formatter)


COMMAND_CLASS = _BenchCommand


@dataclass(frozen=True, slots=True)
class BenchFlags:
    """What suites are told. Each takes some of them."""

    limit: Annotated[int | None, typer.Option(help="First N rows only.")] = None
    max_tokens: Annotated[int | None, typer.Option(help="Maximum tokens of a row.")] = None
    repeats: Annotated[int | None, typer.Option(help="How often a row is decoded.")] = None
    calibrate: Annotated[
        bool | None,
        typer.Option(help="Try windows and settings of peers first, two minutes. Default: yes."),
    ] = None
    gap_steps: Annotated[
        int | None,
        typer.Option(
            help="Number of steps over which to measure the gap between passes. Default: 1000."
        ),
    ] = None
    part: Annotated[
        list[str] | None,
        typer.Option(help="Run only this part. May be repeated."),
    ] = None
    batch: Annotated[
        list[int] | None,
        typer.Option(help="Run only this batch size. May be repeated. Default: all."),
    ] = None
    quick: Annotated[bool, typer.Option("--quick", help="Measure less, in a few minutes.")] = False


def bench(
    environ: Mapping[str, str],
    *,
    suite: Annotated[str, typer.Argument(help="The suite to run, or plot.")],
    drawn: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="plot: the JSON of a suite, to be drawn as SVG."),
    ] = None,
    config_path: ConfigOption = None,
    input_paths: Annotated[
        list[Path] | None,
        typer.Option(
            "--input",
            help="JSON lines. May be repeated for drafters. Default: our own prompts.",
        ),
    ] = None,
    flags: BenchFlags,
    json_path: JsonOption = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="plot: the SVG file. Default: beside the JSON."),
    ] = None,
) -> None:
    """Measure ratios in one run: ours in turns with each other, and peers beside us."""
    if suite == "plot":
        from deploy.cli.bench_chart import draw_file

        if drawn is None:
            raise InvalidRequestError("file", "expected the JSON of a suite after `plot`")
        typer.echo(draw_file(drawn, output))
        return
    if drawn is not None or output is not None:
        raise InvalidRequestError("suite", f"only plot takes a file, not {suite}")
    from cluster.config.load import load_config
    from deploy.bench.harness import Asked, describe_machine, suites

    chosen = suites().get(suite)
    if chosen is None:
        names = ", ".join([*suites(), "plot"])
        raise InvalidRequestError("suite", f"expected one of {names}, got {suite!r}")
    _check(chosen, asdict(flags))
    if json_path is not None:
        check_writable("json", json_path)

    def save(document: Document) -> None:
        if json_path is not None:
            write_json(json_path, {"suite": suite, "machine": machine, **document})

    inputs = input_paths or (BENCH_INPUTS if suite == "drafters" else [DEFAULT_INPUT])
    if len(inputs) > 1 and suite != "drafters":
        raise InvalidRequestError("--input", f"the suite {suite} reads one file; name one")
    config, machine = load_config(config_path, environ), describe_machine()
    with (
        tempfile.TemporaryDirectory() as folder,
        teller(Console(stderr=True), every=LONG_WORK_SECONDS) as tell,
    ):
        asked = Asked(
            config=config,
            home=default_home(environ),
            folder=Path(folder),
            inputs=inputs,
            tell=tell,
            save=save,
            **_filled(chosen, asdict(flags)),
        )
        document = chosen.run(asked)
    chosen.show(Console(), document)
    save(document)
    if document.get("failed"):
        raise typer.Exit(1)


def _filled(suite: Suite, flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that have a value, by the user or by the suite."""
    amounts = {name: amount[flags["quick"]] for name, amount in suite.amounts.items()}
    return amounts | {name: value for name, value in flags.items() if value is not None}


def _check(suite: Suite, flags: Mapping[str, Any]) -> None:
    """Raise InvalidRequestError for a flag that the suite does not take, and for a bad value."""
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if value not in (None, False) and name not in suite.flags:
            raise InvalidRequestError(
                f"--{flag}", f"the suite {suite.name} does not take this flag"
            )
    for name in ("limit", "max_tokens", "repeats", "gap_steps"):
        check_at_least_one(name.replace("_", "-"), flags[name])
    _check_all("part", flags["part"], suite.parts)
    _check_all("batch", flags["batch"], suite.batches)


def _check_all(flag: str, values: Sequence[object] | None, known: Collection[object]) -> None:
    for value in values or ():
        if value not in known:
            names = ", ".join(map(str, known))
            raise InvalidRequestError(flag, f"expected {names}, got {value!r}")

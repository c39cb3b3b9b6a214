"""`paceline generate`: decodes an input file on a cluster into an output file."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.decoding.policy import POLICIES
from deploy.cli.reach import reach_cluster
from deploy.rows.batch import Answer, Failure, announce, answers_in_order, complain, row_progress
from deploy.rows.inputs import read_rows
from deploy.rows.outputs import RowSink, whole_file
from deploy.terminal.options import (
    AccessFlags,
    ConfigOption,
    DraftingFlags,
    LimitOption,
    MaxTokensOption,
    QuietOption,
    SamplingFlags,
    ServerOption,
    TemperatureOption,
    VerificationOption,
    check_at_least_one,
    check_request,
)
from paceline.errors import InvalidRequestError
from paceline.options import GenerateOptions
from paceline.text import counted


@dataclass(slots=True)
class Totals:
    """Counts of a run."""

    rows: int = 0
    failed: int = 0
    tokens: int = 0
    steps: int = 0

    def add(self, answer: Answer) -> None:
        self.rows += 1
        if isinstance(answer.outcome, Failure):
            self.failed += 1
            return
        self.tokens += len(answer.outcome.token_ids)
        self.steps += answer.outcome.stats.steps

    def summary(self, seconds: float) -> str:
        speed = self.tokens / seconds if seconds else 0.0
        length = f"{self.tokens / self.steps:.2f}" if self.steps else "none"
        line = (
            f"{counted(self.rows, 'row')}, {counted(self.tokens, 'token')} in {seconds:.1f} s: "
            f"{speed:.1f} tokens/s, acceptance length {length}"
        )
        return f"{line}, {counted(self.failed, 'row')} failed" if self.failed else line


def output_row(answer: Answer) -> dict[str, object]:
    """A row of the output file. A failed row has an `error` and no tokens.

    `stopping_state` is present if the stopping rule has one. `speculation` holds the fields of
    SpeculationStats (inference.proto) and figures derived from them.
    """
    row: dict[str, object] = {}
    if answer.row.id is not None:
        row["id"] = answer.row.id
    row["index"] = answer.index
    outcome = answer.outcome
    if isinstance(outcome, Failure):
        return row | {
            "prompt_token_ids": [],
            "token_ids": [],
            "text": "",
            "finish_reason": "error",
            "steps": 0,
            "drafted": 0,
            "accepted": 0,
            "acceptance_length": None,
            "seconds": 0.0,
            "ttft_seconds": None,
            "speculation": None,
            "error": outcome.message,
        }
    stats, drafting = outcome.stats, outcome.stats.speculation
    if stats.stopping_state:
        row["stopping_state"] = dict(stats.stopping_state)
    return row | {
        "prompt_token_ids": list(outcome.prompt_token_ids),
        "token_ids": list(outcome.token_ids),
        "text": outcome.text,
        "finish_reason": outcome.finish_reason,
        "steps": stats.steps,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "acceptance_length": stats.acceptance_length,
        "seconds": stats.seconds,
        "ttft_seconds": stats.ttft_seconds,
        "speculation": {
            "acceptance": drafting.acceptance,
            "acceptance_at": drafting.acceptance_at,
            "used_share": drafting.used_share,
            "hit_rate": drafting.hit_rate,
            **asdict(drafting),
        },
    }


def generate(
    environ: Mapping[str, str],
    *,
    input_path: Annotated[
        Path, typer.Option("--input", help="JSON lines: prompt, question, messages or turns.")
    ],
    output_path: Annotated[
        Path, typer.Option("--output", help="Written at the end, whole or not at all.")
    ],
    config_path: ConfigOption = None,
    max_tokens: MaxTokensOption = 256,
    temperature: TemperatureOption = None,
    sampling: SamplingFlags,
    policy: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(POLICIES)} (docs/policies.md).")
    ] = None,
    verification: VerificationOption = None,
    window: Annotated[
        int | None, typer.Option(help="Maximum candidates that a step verifies.")
    ] = None,
    drafting: DraftingFlags,
    concurrency: Annotated[int, typer.Option(help="Requests in flight.")] = 1,
    limit: LimitOption = None,
    server: ServerOption = None,
    access_flags: AccessFlags,
    quiet: QuietOption = False,
) -> None:
    """Decode every row of a file. Exit code 1: some rows failed; the others are written."""
    from cluster.config.load import load_config

    options = GenerateOptions(
        max_tokens=max_tokens,
        temperature=temperature,
        policy=policy,
        rule=verification,
        window=window,
        **asdict(sampling),
        **asdict(drafting),
    )
    access = access_flags.check()
    check_at_least_one("concurrency", concurrency)
    check_at_least_one("limit", limit)
    config = load_config(config_path, environ)
    check_request(options, config, server=server)
    rows = read_rows(input_path, limit=limit)
    if output_path.exists() and output_path.samefile(input_path):
        raise InvalidRequestError("output", "is the input file; name another one")
    console = Console(stderr=True, quiet=quiet)
    errors = Console(stderr=True) if quiet else console
    with (
        whole_file(output_path) as sink,
        reach_cluster(config, environ, console=console, server=server, access=access) as address,
    ):
        announce(
            console,
            f"generating: {counted(len(rows), 'row')} of {input_path} on the server at "
            f"{address}, {counted(concurrency, 'request')} at a time",
        )
        start = time.monotonic()
        with (
            row_progress(console) as progress,
            progress.counting("generating", len(rows)) as advance,
        ):
            answers = answers_in_order(
                address, rows, options, concurrency=concurrency, access=access, on_done=advance
            )
            totals = asyncio.run(_written(answers, sink, errors))
        seconds = time.monotonic() - start
    announce(console, f"wrote {output_path} after {seconds:.1f} s")
    told = totals.summary(seconds)
    emulated = config.target.emulated if server is None else None
    typer.echo(told if emulated is None else f"{told} (emulated: {emulated})")
    raise typer.Exit(1 if totals.failed else 0)


async def _written(answers: AsyncIterator[Answer], sink: RowSink, errors: Console) -> Totals:
    totals = Totals()
    async for answer in answers:
        totals.add(answer)
        complain(errors, answer)
        sink.write(output_row(answer))
    return totals

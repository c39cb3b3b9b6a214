"""`paceline trace`: draws what the devices do, round by round."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from deploy.cli.reach import reach_cluster, running_server
from deploy.rows.inputs import BadRow, InputRow, read_rows
from deploy.rows.outputs import check_writable, write_json
from deploy.terminal.options import (
    AccessFlags,
    BranchesOption,
    ConfigOption,
    LimitOption,
    MaxTokensOption,
    SeedOption,
    ServerOption,
    TemperatureOption,
    check_at_least_one,
    check_request,
)
from paceline.access import Access
from paceline.errors import InvalidRequestError
from paceline.options import GenerateOptions
from paceline.text import counted

if TYPE_CHECKING:
    from deploy.cli.trace_file import TraceFile

USUAL_SECONDS = 5.0


def trace(
    environ: Mapping[str, str],
    *,
    html_path: Annotated[
        Path | None,
        typer.Option(
            "--html",
            help="The time line as a page of its own. Default without --output: trace.html.",
        ),
    ] = None,
    output_path: Annotated[
        Path | None,
        typer.Option("--output", help="JSON for ui.perfetto.dev or chrome://tracing."),
    ] = None,
    input_path: Annotated[
        Path | None,
        typer.Option(
            "--input",
            help="JSON lines to decode. Without it, watch whatever a running server does.",
        ),
    ] = None,
    config_path: ConfigOption = None,
    seconds: Annotated[
        float, typer.Option(help="Without --input: seconds to watch.")
    ] = USUAL_SECONDS,
    max_tokens: MaxTokensOption = 64,
    temperature: TemperatureOption = None,
    seed: SeedOption = 0,
    policy: Annotated[str | None, typer.Option(help="Default: the server's.")] = None,
    window: Annotated[
        int | None, typer.Option(help="Maximum candidates that a step verifies.")
    ] = None,
    branches: BranchesOption = None,
    concurrency: Annotated[int, typer.Option(help="Requests in flight.")] = 1,
    limit: LimitOption = 4,
    server: ServerOption = None,
    access_flags: AccessFlags,
) -> None:
    """Watch rounds of drafting and verification, and draw them on a time line.

    Each device has a row. Windows and verdicts are slices; arrows go from proposals to their
    verdicts. With --input it decodes the first rows of a file, else it watches a server.
    """
    from cluster.config.load import load_config

    options = GenerateOptions(
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        policy=policy,
        window=window,
        branches=branches,
    )
    access = access_flags.check()
    check_at_least_one("concurrency", concurrency)
    check_at_least_one("limit", limit)
    if not 0 < seconds < float("inf"):
        raise InvalidRequestError("seconds", f"expected a duration above 0, got {seconds:g}")
    if html_path is None and output_path is None:
        html_path = Path("trace.html")
    for name, path in (("html", html_path), ("output", output_path)):
        if path is not None:
            check_writable(name, path)
    config = load_config(config_path, environ)
    if input_path is not None:
        check_request(options, config, server=server)
    rows = read_rows(input_path, limit=limit) if input_path is not None else []
    console = Console(stderr=True)
    with ExitStack() as stack:
        if input_path is None and server is None:
            server = running_server(environ, "or give --input to decode on a private one")
        address = stack.enter_context(
            reach_cluster(config, environ, console=console, server=server, access=access)
        )
        drawn = asyncio.run(
            _watch_rows(address, rows, options, concurrency, access)
            if input_path is not None
            else _watch(address, seconds, access)
        )
    told = (
        f"{counted(drawn.num_steps, 'step')}, {drawn.num_passes} passes of drafters, "
        f"{counted(drawn.num_arrows, 'arrow')}"
    )
    if html_path is not None:
        from cluster.gateway.console import trace_page

        html_path.write_text(trace_page(drawn.rounds), encoding="utf-8")
        typer.echo(f"{html_path}: {told}; open it in a browser")
    if output_path is not None:
        write_json(output_path, drawn.document())
        typer.echo(f"{output_path}: {told}; open it at https://ui.perfetto.dev")
    if not drawn.num_steps:
        typer.echo(
            f"nothing was decoded in {seconds:g} s: send requests meanwhile, as with `paceline "
            "chat`, or name rows to decode with --input",
            err=True,
        )


async def _watch_rows(
    address: str,
    rows: Sequence[InputRow | BadRow],
    options: GenerateOptions,
    concurrency: int,
    access: Access,
) -> TraceFile:
    """Trace until every row is decoded. Raises InvalidRequestError for a row that failed."""
    from deploy.cli.trace_file import tracing
    from deploy.rows.batch import Failure, answers_in_order

    async with tracing(address, access) as drawn:
        async for answer in answers_in_order(
            address, rows, options, concurrency=concurrency, access=access
        ):
            if isinstance(answer.outcome, Failure):
                raise InvalidRequestError("input", answer.outcome.message)
    return drawn


async def _watch(address: str, seconds: float, access: Access) -> TraceFile:
    from deploy.cli.trace_file import tracing

    async with tracing(address, access) as drawn:
        await asyncio.sleep(seconds)
    return drawn

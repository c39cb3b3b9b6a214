"""`paceline trace`: draws what the devices do, round by round."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from deploy.cli.options import (
    BranchesOption,
    CaOption,
    ConfigOption,
    KeyOption,
    LimitOption,
    MaxTokensOption,
    SeedOption,
    ServerOption,
    TemperatureOption,
    check_access,
    check_at_least_one,
    check_request,
)
from deploy.cli.reach import reach_cluster
from deploy.rows.inputs import BadRow, InputRow, read_rows
from deploy.rows.outputs import check_writable, write_json
from paceline.access import Access
from paceline.errors import InvalidRequestError, UnavailableError
from paceline.options import GenerateOptions
from paceline.text import counted
from workers.models.catalog import default_home

if TYPE_CHECKING:
    from deploy.cli.trace_file import TraceFile

USUAL_SECONDS = 5.0


def add_commands(app: typer.Typer, environ: Mapping[str, str]) -> None:
    """Add `trace` to the command tree."""

    @app.command()
    def trace(
        output_path: Annotated[
            Path, typer.Option("--output", help="JSON for ui.perfetto.dev or chrome://tracing.")
        ],
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
        key: KeyOption = None,
        ca: CaOption = None,
    ) -> None:
        """Watch rounds of drafting and verification, and write them as a Chrome trace.

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
        access = check_access(key, ca)
        check_at_least_one("concurrency", concurrency)
        check_at_least_one("limit", limit)
        if not 0 < seconds < float("inf"):
            raise InvalidRequestError("seconds", f"expected a duration above 0, got {seconds:g}")
        check_writable("output", output_path)
        config = load_config(config_path, environ)
        if input_path is not None:
            check_request(options, config, server=server)
        rows = read_rows(input_path, limit=limit) if input_path is not None else []
        console = Console(stderr=True)
        with ExitStack() as stack:
            if input_path is None and server is None:
                server = _running(environ)
            address = stack.enter_context(
                reach_cluster(config, environ, console=console, server=server, access=access)
            )
            drawn = asyncio.run(
                _watch_rows(address, rows, options, concurrency, access)
                if input_path is not None
                else _watch(address, seconds, access)
            )
        write_json(output_path, drawn.document())
        typer.echo(
            f"{output_path}: {counted(drawn.num_steps, 'step')}, "
            f"{drawn.num_passes} passes of drafters, "
            f"{counted(drawn.num_arrows, 'arrow')}; open it at https://ui.perfetto.dev"
        )


def _running(environ: Mapping[str, str]) -> str:
    """Address of the cluster of `up`, whatever its configuration."""
    from deploy.session import ray_head
    from deploy.session.cluster import present_record

    record = present_record(default_home(environ))
    if record is None or record.address is None or not ray_head.is_listening(record.address):
        raise UnavailableError(
            "no server is running: name one with --server, start one with "
            "`paceline up`, or give --input to decode on a private one"
        )
    return record.address


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

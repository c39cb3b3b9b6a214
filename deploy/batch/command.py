"""The command line of a batch, for `paceline batch` and for the job `deploy.jobs.batch`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Protocol

import typer
from rich.console import Console

from cluster.config.load import load_config
from cluster.config.model import Config
from deploy.rows.outputs import check_writable
from deploy.terminal.lines import plain
from deploy.terminal.options import AccessFlags, ConfigOption, QuietOption, ServerOption
from paceline.access import Access
from paceline.errors import InvalidRequestError
from paceline.text import counted

MAX_CONCURRENCY = 1024
"""Most requests in flight, as many as a gateway has open."""

LINE_SECONDS = 10.0
"""Time between two lines of progress in a log."""

_SEEDS = 2**64


class Reach(Protocol):
    """Yields the address of a server of a configuration, or the named one; shows progress."""

    def __call__(
        self,
        config: Config,
        environ: Mapping[str, str],
        *,
        console: Console,
        server: str | None,
        access: Access,
    ) -> AbstractContextManager[str]: ...


# Not flags: `reach` finds the server; `check_path` refuses a file, given with its flag, that would
# not be kept.
def batch(
    environ: Mapping[str, str],
    reach: Reach,
    check_path: Callable[[str, Path], None] | None = None,
    *,
    input_path: Annotated[
        Path, typer.Option("--input", help="OpenAI's batch file: JSON lines (docs/batch.md).")
    ],
    output_path: Annotated[
        Path, typer.Option("--output", help="Written at the end, whole or not at all.")
    ],
    config_path: ConfigOption = None,
    server: ServerOption = None,
    journal_path: Annotated[
        Path | None,
        typer.Option("--journal", help="The finished answers. Default: OUTPUT.journal."),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="A body without a seed has seed + 128 times its row's index.")
    ] = 0,
    concurrency: Annotated[
        int | None,
        typer.Option(help="Choices in flight. Default: target.max_num_seqs of all groups."),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name in bodies. Default: the server's.")
    ] = None,
    access_flags: AccessFlags,
    quiet: QuietOption = False,
) -> None:
    """Answer a batch file. Exit code 1: some rows failed; the output has them too.

    A run that was killed goes on where it was if it is started again.
    """
    if journal_path is None:
        journal_path = output_path.with_name(f"{output_path.name}.journal")
    for flag, path in {"output": output_path, "journal": journal_path}.items():
        if check_path is not None:
            check_path(flag, path)
        if path.exists() and input_path.exists() and path.samefile(input_path):
            raise InvalidRequestError(flag, "is the input file; name another one")
    if journal_path.absolute() == output_path.absolute():
        raise InvalidRequestError("journal", "is the output file; name another one")
    if not 0 <= seed < _SEEDS:
        raise InvalidRequestError("seed", f"expected 0 to 2^64 - 1, got {seed}")
    access = access_flags.check()
    config = load_config(config_path, environ)
    if concurrency is None:
        concurrency = min(config.target.max_num_seqs * config.target.groups, MAX_CONCURRENCY)
    if not 1 <= concurrency <= MAX_CONCURRENCY:
        expected = f"expected an integer from 1 to {MAX_CONCURRENCY}"
        raise InvalidRequestError("concurrency", f"{expected}, got {concurrency}")
    check_writable("output", output_path)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    console = Console(stderr=True, quiet=quiet)
    told, failed = _run(
        *(input_path, output_path, journal_path, config),
        reach=lambda: reach(config, environ, console=console, server=server, access=access),
        access=access,
        seed=seed,
        concurrency=concurrency,
        served_model_name=served_model_name,
        console=console,
    )
    emulated = config.target.emulated if server is None else None
    typer.echo(told if emulated is None else f"{told} (emulated: {emulated})")
    raise typer.Exit(1 if failed else 0)


def _run(
    input_path: Path,
    output_path: Path,
    journal_path: Path,
    config: Config,
    *,
    reach: Callable[[], AbstractContextManager[str]],
    access: Access,
    seed: int,
    concurrency: int,
    served_model_name: str | None,
    console: Console,
) -> tuple[str, int]:
    """Run it. Returns a line about it, and how many rows failed."""
    from cluster.gateway.drivers import DriverPool
    from deploy.batch.batch_file import BatchFile
    from deploy.batch.journal import open_journal
    from deploy.batch.run import Batch

    errors = Console(stderr=True) if console.quiet else console
    file = BatchFile(input_path)
    facts: dict[str, str | int] = {"input": file.digest, "rows": file.num_rows, "seed": seed}
    if served_model_name is not None:
        facts |= {"model": served_model_name}
    with open_journal(journal_path, facts, num_rows=file.num_rows) as journal:
        if journal.cut_off:
            plain(
                errors,
                f"note: the last {journal.cut_off:,} bytes of {journal_path} are incomplete or "
                f"damaged; {counted(journal.done, 'row')} before them are kept",
            )
        batch = Batch(
            file, journal, seed=seed, complain=lambda line: plain(errors, f"error: {line}")
        )
        start = time.monotonic()
        if journal.done < file.num_rows:
            with reach() as address, _Teller(console) as tell:
                plain(
                    console,
                    f"batch: {counted(file.num_rows, 'row')} of {input_path}, of which "
                    f"{journal.done:,} are in {journal_path}; the server at {address}, "
                    f"{counted(concurrency, 'request')} at a time",
                )
                start = time.monotonic()
                pool = DriverPool([address], served_model_name=served_model_name, access=access)
                asyncio.run(
                    batch.decode(
                        pool,
                        concurrency=concurrency,
                        tell=lambda: tell(batch.totals.progress(time.monotonic() - start)),
                    )
                )
        journal.sync()
        batch.write(output_path)
    return batch.totals.progress(time.monotonic() - start), batch.totals.failed


class _Teller:
    """Shows progress: in one changing line on a terminal, else as a line now and then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        is_shown = console.is_terminal and not console.quiet
        self._status = console.status("") if is_shown else None
        self._said = time.monotonic()

    def __enter__(self) -> Callable[[str], None]:
        if self._status is not None:
            self._status.start()
        return self._tell

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def _tell(self, line: str) -> None:
        if self._status is not None:
            self._status.update(line)
        elif time.monotonic() - self._said >= LINE_SECONDS:
            self._said = time.monotonic()
            plain(self._console, f"batch: {line}")

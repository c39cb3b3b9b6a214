"""The command of a batch: its rows on a server, some at a time, each answer into the journal.

`paceline batch` and the job `deploy.jobs.batch` are this command.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

import typer
from rich.console import Console

from cluster.config.load import load_config
from cluster.config.model import Config
from cluster.gateway.drivers import DriverPool
from cluster.gateway.metrics import GatewayMetrics, RequestWatch
from cluster.gateway.openai_answers import Answer
from cluster.gateway.requests import CompletionRequest
from deploy.batch.batch_file import BatchFile, BatchRow, answered, refused
from deploy.batch.journal import Journal, RowResult, open_journal
from deploy.rows.outputs import check_writable, whole_file
from deploy.terminal.lines import plain
from deploy.terminal.options import AccessFlags, ConfigOption, QuietOption, ServerOption
from paceline.access import Access
from paceline.errors import (
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    PacelineError,
    PermissionDeniedError,
    RequestFaultError,
    UnauthenticatedError,
    UnavailableError,
)
from paceline.text import counted

MAX_CONCURRENCY = 1024
"""Most requests in flight, as many as a gateway has open."""

LINE_SECONDS = 10.0
"""Time between two lines of progress in a log."""

PATIENCE_SECONDS = 300.0
"""A run ends if a row cannot be asked for this long, while no other ends: the server is lost."""

SYNC_SECONDS = 1.0
"""How often answers are made to survive a power failure."""

_LONGEST_PAUSE = 5.0
_DEFECTS = 3
"""Internal errors of a row after which it fails."""
_MAX_COMPLAINTS = 20
"""Failed rows that are named. The output has all."""
_SKIPPED_AT_ONCE = 1000


@dataclass(slots=True)
class Totals:
    """Counts of a run. `found`: rows that an earlier run had answered."""

    rows: int
    found: int
    done: int = 0
    failed: int = 0
    tokens: int = 0
    steps: int = 0

    def add(self, result: RowResult) -> None:
        self.done += 1
        self.failed += result.failed
        self.tokens += result.tokens
        self.steps += result.steps

    def progress(self, seconds: float) -> str:
        """One line for people. Speeds are those of this run."""
        speed = self.tokens / seconds if seconds else 0.0
        length = f"{self.tokens / self.steps:.2f}" if self.steps else "none"
        line = (
            f"{self.found + self.done:,} of {counted(self.rows, 'row')} after {seconds:.0f} s: "
            f"{speed:.1f} tokens/s, acceptance length {length}"
        )
        return f"{line}, {counted(self.failed, 'row')} failed" if self.failed else line


class Batch:
    """A batch and its journal. `complain` gets what is wrong with rows, a line each."""

    def __init__(
        self, file: BatchFile, journal: Journal, *, seed: int, complain: Callable[[str], None]
    ) -> None:
        self.totals = Totals(file.num_rows, found=journal.done, failed=journal.failed)
        self._file = file
        self._journal = journal
        self._seed = seed
        self._complain = complain
        self._num_complaints = 0
        self._model = ""
        self._metrics = GatewayMetrics()  # As behind HTTP; nobody asks for them here.
        self._moved = 0.0

    async def decode(self, pool: DriverPool, *, concurrency: int, tell: Callable[[], None]) -> None:
        """Answer all rows that have no answer, `concurrency` choices at a time.

        `tell` is called about once a second. Raises UnavailableError if the server is lost, and
        the error of a file that cannot be read or written.
        """
        try:
            async with pool, asyncio.TaskGroup() as group:
                ticking = group.create_task(self._tick(tell))
                await self._find_model(pool)
                turns = asyncio.Semaphore(concurrency)
                async with asyncio.TaskGroup() as rows:
                    skipped = 0
                    for row in self._file.rows(self._seed, self._journal.__contains__):
                        if row is None:
                            skipped += 1
                            if skipped % _SKIPPED_AT_ONCE == 0:
                                await asyncio.sleep(0)
                            continue
                        held = min(_num_choices(row), concurrency)
                        for _ in range(held):
                            await turns.acquire()
                        rows.create_task(self._end(pool, row, turns, held))
                ticking.cancel()
        except BaseExceptionGroup as errors:
            raise next(_causes(errors)) from None

    def write(self, path: Path) -> None:
        """Write the output file, whole or not at all."""
        with whole_file(path) as sink:
            for index in range(self._file.num_rows):
                sink.write_line(self._journal.line(index).decode())

    async def _tick(self, tell: Callable[[], None]) -> None:
        synced = self.totals.done
        while True:
            await asyncio.sleep(SYNC_SECONDS)
            if synced != self.totals.done:
                synced = self.totals.done
                await asyncio.to_thread(self._journal.sync)
            tell()

    async def _find_model(self, pool: DriverPool) -> None:
        """Wait until the server serves, and check that the journal is of its model."""
        began = time.monotonic()
        while not self._model:
            try:
                self._model = pool.models()[0]
            except UnavailableError as error:
                self._check_patience(error, began)
                await asyncio.sleep(1.0)
        self._journal.agree({"model": self._model})

    async def _end(
        self, pool: DriverPool, row: BatchRow, turns: asyncio.Semaphore, held: int
    ) -> None:
        result = await self._result(pool, row)
        self._journal.add(row.index, result)
        self.totals.add(result)
        self._moved = time.monotonic()
        for _ in range(held):
            turns.release()

    async def _result(self, pool: DriverPool, row: BatchRow) -> RowResult:
        """Ask until the row is answered, or fails for a reason of its own."""
        if isinstance(row.asked, PacelineError):
            return self._refused(row, row.asked)
        defects, pause = 0, 0.1
        first_refusal: float | None = None
        while True:
            model = row.asked.model or self._model
            try:
                described, watch = pool.describe(model), RequestWatch(self._metrics)
                answer = Answer(pool, row.asked, model=model, described=described, watch=watch)
                return answered(row, *await answer.completed())
            except UnauthenticatedError:
                raise
            except (InvalidRequestError, PermissionDeniedError, RequestFaultError) as error:
                return self._refused(row, error)
            except (OverloadedError, UnavailableError, DeadlineError) as error:
                first_refusal = first_refusal or time.monotonic()
                self._check_patience(error, first_refusal)
            except PacelineError as error:
                defects += 1
                if defects == _DEFECTS:
                    return self._refused(row, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _refused(self, row: BatchRow, error: PacelineError) -> RowResult:
        result, told = refused(row, error)
        self._num_complaints += 1
        if self._num_complaints <= _MAX_COMPLAINTS:
            self._complain(f"{self._file.path}:{row.line}: {told.message}")
        elif self._num_complaints == _MAX_COMPLAINTS + 1:
            self._complain("more rows failed; the output has the reason of each")
        return result

    def _check_patience(self, error: PacelineError, began: float) -> None:
        if time.monotonic() - max(self._moved, began) > PATIENCE_SECONDS:
            raise UnavailableError(
                f"no row has ended for {PATIENCE_SECONDS:g} s: {error}. The finished answers are "
                "in the journal; run the same command again once the server takes requests"
            ) from error


def _num_choices(row: BatchRow) -> int:
    return row.asked.num_choices if isinstance(row.asked, CompletionRequest) else 1


def _causes(errors: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _causes(error)
        else:
            yield error


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


@dataclass(frozen=True, slots=True)
class BatchFlags:
    """What the command is told, besides how to reach the server."""

    input_path: Annotated[
        Path, typer.Option("--input", help="OpenAI's batch file: JSON lines (docs/batch.md).")
    ]
    output_path: Annotated[
        Path, typer.Option("--output", help="Written at the end, whole or not at all.")
    ]
    config_path: ConfigOption = None
    server: ServerOption = None
    journal_path: Annotated[
        Path | None,
        typer.Option("--journal", help="The finished answers. Default: OUTPUT.journal."),
    ] = None
    seed: Annotated[
        int, typer.Option(help="A body without a seed has seed + 128 times its row's index.")
    ] = 0
    concurrency: Annotated[
        int | None,
        typer.Option(help="Choices in flight. Default: target.max_num_seqs of all groups."),
    ] = None
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name in bodies. Default: the server's.")
    ] = None

    def journal(self, check_path: Callable[[str, Path], None] | None) -> Path:
        """The journal's path. Raises InvalidRequestError for files that would not do."""
        output = self.output_path
        journal = self.journal_path or output.with_name(f"{output.name}.journal")
        for flag, path in {"output": output, "journal": journal}.items():
            if check_path is not None:
                check_path(flag, path)
            if path.exists() and self.input_path.exists() and path.samefile(self.input_path):
                raise InvalidRequestError(flag, "is the input file; name another one")
        if journal.absolute() == output.absolute():
            raise InvalidRequestError("journal", "is the output file; name another one")
        return journal

    def num_in_flight(self, config: Config) -> int:
        """Choices in flight. Raises InvalidRequestError."""
        number = self.concurrency
        if number is None:
            number = min(config.target.max_num_seqs * config.target.groups, MAX_CONCURRENCY)
        if not 1 <= number <= MAX_CONCURRENCY:
            expected = f"expected an integer from 1 to {MAX_CONCURRENCY}"
            raise InvalidRequestError("concurrency", f"{expected}, got {number}")
        return number


# Not flags: `reach` finds the server; `check_path` refuses a file, given with its flag, that would
# not be kept.
def batch(
    environ: Mapping[str, str],
    reach: Reach,
    check_path: Callable[[str, Path], None] | None = None,
    *,
    flags: BatchFlags,
    access_flags: AccessFlags,
    quiet: QuietOption = False,
) -> None:
    """Answer a batch file. Exit code 1: some rows failed; the output has them too.

    A run that was killed goes on where it was if it is started again.
    """
    server, seed, output_path = flags.server, flags.seed, flags.output_path
    journal_path = flags.journal(check_path)
    if not 0 <= seed < _SEEDS:
        raise InvalidRequestError("seed", f"expected 0 to 2^64 - 1, got {seed}")
    access = access_flags.check()
    config = load_config(flags.config_path, environ)
    concurrency = flags.num_in_flight(config)
    check_writable("output", output_path)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    console = Console(stderr=True, quiet=quiet)
    errors = Console(stderr=True) if quiet else console
    file, name = BatchFile(flags.input_path), flags.served_model_name
    facts: dict[str, str | int] = {"input": file.digest, "rows": file.num_rows, "seed": seed}
    if name is not None:
        facts |= {"model": name}
    with open_journal(journal_path, facts, num_rows=file.num_rows) as journal:
        if journal.cut_off:
            plain(
                errors,
                f"note: the last {journal.cut_off:,} bytes of {journal_path} are incomplete or "
                f"damaged; {counted(journal.done, 'row')} before them are kept",
            )
        run = Batch(file, journal, seed=seed, complain=lambda line: plain(errors, f"error: {line}"))
        start = time.monotonic()
        if journal.done < file.num_rows:
            with (
                reach(config, environ, console=console, server=server, access=access) as address,
                _Teller(console) as tell,
            ):
                plain(
                    console,
                    f"batch: {counted(file.num_rows, 'row')} of {file.path}, of which "
                    f"{journal.done:,} are in {journal_path}; the server at {address}, "
                    f"{counted(concurrency, 'request')} at a time",
                )
                start = time.monotonic()
                pool = DriverPool([address], served_model_name=name, access=access)
                asyncio.run(
                    run.decode(
                        pool,
                        concurrency=concurrency,
                        tell=lambda: tell(run.totals.progress(time.monotonic() - start)),
                    )
                )
        journal.sync()
        run.write(output_path)
    told = run.totals.progress(time.monotonic() - start)
    emulated = config.target.emulated if server is None else None
    typer.echo(told if emulated is None else f"{told} (emulated: {emulated})")
    raise typer.Exit(1 if run.totals.failed else 0)


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

"""Runs a batch: its rows on a server, some at a time, each answer into the journal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster.gateway.answers import Answer
from cluster.gateway.drivers import DriverPool
from cluster.gateway.metrics import GatewayMetrics, RequestWatch
from cluster.gateway.requests import CompletionRequest
from deploy.batch.batch_file import BatchFile, BatchRow, answered, refused
from deploy.batch.journal import Journal, RowResult
from deploy.rows.outputs import whole_file
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
        """Count a row that has ended."""
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

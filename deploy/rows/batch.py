"""Sends the rows of an input file to a server, some at a time, and shows progress on stderr."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from deploy.rows.inputs import BadRow, InputRow
from deploy.terminal.lines import plain
from paceline.access import Access
from paceline.client import AsyncClient
from paceline.errors import InvalidRequestError, OverloadedError
from paceline.generation import Completion
from paceline.options import GenerateOptions
from paceline.text import counted

_RETRY_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Seconds to wait before each new attempt of a request that was refused because of a full queue."""


SEED_SPACE = 2**64


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a row has no answer. `message` begins with its file and line."""

    message: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a row. `index` counts the rows of its file from 0."""

    index: int
    row: InputRow | BadRow
    outcome: Completion | Failure


async def answers_in_order(
    address: str,
    rows: Sequence[InputRow | BadRow],
    options: GenerateOptions,
    *,
    concurrency: int,
    access: Access | None = None,
    on_done: Callable[[], None] = lambda: None,
) -> AsyncIterator[Answer]:
    """Send every good row, `concurrency` at a time, and yield the answers in the rows' order.

    All rows have the same `options`, but row i has the seed `options.seed` + i (0 + i for None).
    A row that is malformed or refused gives a Failure, and the others go on. `on_done` is called
    for each finished row, in any order. `access`: of the client. Raises UnavailableError
    if the server is gone. If the caller stops early, requests in flight are cancelled.
    """
    turns = asyncio.Semaphore(concurrency)
    async with AsyncClient(address, **(access or {})) as client:
        first_seed = options.seed or 0

        async def ask(index: int, row: InputRow | BadRow) -> Answer:
            if isinstance(row, BadRow):
                outcome: Completion | Failure = Failure(row.message)
            else:
                own = replace(options, seed=(first_seed + index) % SEED_SPACE)
                async with turns:
                    outcome = await _ask(client, row, own)
            on_done()
            return Answer(index, row, outcome)

        tasks = [asyncio.create_task(ask(index, row)) for index, row in enumerate(rows)]
        try:
            for task in tasks:
                yield await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _ask(
    client: AsyncClient, row: InputRow, options: GenerateOptions
) -> Completion | Failure:
    for pause in _RETRY_SECONDS:
        try:
            return await client.generate(row.input, options)
        except OverloadedError:
            await asyncio.sleep(pause)
        except InvalidRequestError as error:
            return Failure(row.tell(str(error)))
    try:
        return await client.generate(row.input, options)
    except (OverloadedError, InvalidRequestError) as error:
        return Failure(row.tell(str(error)))


LINE_SECONDS = 10.0
"""The least time between two lines."""
SILENT_SECONDS = 60.0
"""Seconds after which a line is printed even if less than a tenth of the rows is newly done."""
_TENTHS = 10


class RowProgress(Protocol):
    """Shows the progress of a count. Only one count runs at a time."""

    def counting(self, what: str, total: int) -> AbstractContextManager[Callable[[], None]]:
        """Count to `total` while the block runs. Yields a function to call for each one done."""


class LineProgress:
    """Prints a line now and then, where no bar can be drawn."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float]) -> None:
        """`clock` returns seconds."""
        self._say = say
        self._clock = clock
        self._began = self._said = clock()

    @contextmanager
    def counting(self, what: str, total: int) -> Iterator[Callable[[], None]]:
        done = said = 0

        def advance() -> None:
            nonlocal done, said
            done += 1
            silent = self._clock() - self._said
            tenth = (done - said) * _TENTHS >= total
            if silent >= SILENT_SECONDS or (silent >= LINE_SECONDS and tenth):
                self._said = self._clock()
                said = done
                elapsed = self._said - self._began
                self._say(f"{what}: {done} of {counted(total, 'row')}, {elapsed:.0f} s")

        yield advance


class _Bars:
    def __init__(self, bars: Progress) -> None:
        self._bars = bars

    @contextmanager
    def counting(self, what: str, total: int) -> Iterator[Callable[[], None]]:
        bar = self._bars.add_task(what, total=total)
        try:
            yield lambda: self._bars.advance(bar)
        finally:
            self._bars.remove_task(bar)


@contextmanager
def row_progress(console: Console) -> Iterator[RowProgress]:
    """Bars on a terminal, lines elsewhere, nothing on a quiet console."""
    if not console.is_terminal or console.quiet:
        yield LineProgress(lambda line: plain(console, line), time.monotonic)
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as bars:
        yield _Bars(bars)


def announce(console: Console, line: str) -> None:
    """Print what begins or has ended, if no bar shows it."""
    if not console.is_terminal:
        plain(console, line)


def complain(console: Console, answer: Answer) -> None:
    """Name a failed row by its file and line."""
    if isinstance(answer.outcome, Failure):
        plain(console, f"error: {answer.outcome.message}")

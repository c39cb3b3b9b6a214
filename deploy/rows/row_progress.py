"""Shows progress over the rows of a file, and names failed rows, on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from deploy.rows.batch import Answer, Failure
from deploy.terminal.lines import plain
from paceline.text import counted

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
        """See RowProgress."""
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

"""Progress over the rows of a file, and complaints about some of them, on stderr."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from deploy.batch import Answer, Failure


def row_progress(console: Console) -> Progress:
    """A bar of rows done, shown only on a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def complain(console: Console, answer: Answer) -> None:
    """Name a failed row on stderr."""
    if isinstance(answer.outcome, Failure):
        console.print(
            f"error: row {answer.index}: {answer.outcome.message}", markup=False, soft_wrap=True
        )

"""Shows the fetch of a model: a progress bar on a terminal, else one line a stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from deploy.terminal.lines import plain
from workers.models.fetch import FetchProgress, Progress

# Stages long enough to be reported where no bar is shown.
_TOLD = ("waiting for another fetch", "downloading", "converting")


@contextmanager
def show_fetch(console: Console, name: str) -> Iterator[Progress]:
    """Yield the `progress` argument of `resolve_model`. The bar is removed at the end."""
    if console.is_terminal and not console.quiet:
        with _bars(console, name) as show:
            yield show
    else:
        yield _lines(console, name)


def _lines(console: Console, name: str) -> Progress:
    """Reports each of the long stages once."""
    told: set[str] = set()

    def show(now: FetchProgress) -> None:
        if now.stage in _TOLD and now.stage not in told:
            told.add(now.stage)
            plain(console, f"{name}: {now.stage}")

    return show


@contextmanager
def _bars(console: Console, name: str) -> Iterator[Progress]:
    """Shows a bar for each stage. It fills if bytes are counted; else it moves."""
    bar = ProgressBar(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    with bar:
        stage = bar.add_task(f"{name}: looking", total=None, amount="")

        def show(now: FetchProgress) -> None:
            nonlocal stage
            description = f"{name}: {now.stage}"
            if bar.tasks[-1].description != description:
                bar.remove_task(stage)
                stage = bar.add_task(description, total=now.total, amount="")
            if now.done is not None and now.total is not None:
                amount = f"{now.done / 1e6:.0f} of {now.total / 1e6:.0f} MB"
                bar.update(stage, completed=now.done, total=now.total, amount=amount)

        yield show

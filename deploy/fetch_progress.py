"""A progress bar for fetching a model. Silent where the console is no terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from workers.model_fetch import FetchProgress, Progress


@contextmanager
def show_fetch(console: Console, name: str) -> Iterator[Progress]:
    """Yield what to hand to `resolve_model`; the bar is gone when the block ends."""
    bar = ProgressBar(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task(f"{name}: looking", total=None)

        def show(now: FetchProgress) -> None:
            bar.update(task, description=f"{name}: {now.stage}", total=now.total)
            bar.update(task, completed=now.done or 0)

        yield show

"""A progress bar for fetching a model. Silent where the console is no terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from workers.model_fetch import FetchProgress, Progress


@contextmanager
def show_fetch(console: Console, name: str) -> Iterator[Progress]:
    """Yield what to hand to `resolve_model`; the bar is gone when the block ends.

    Each stage has a bar of its own: one that fills where bytes are counted, else one that moves.
    """
    bar = ProgressBar(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
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

"""`paceline models fetch NAME` and `paceline models list`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer
from rich.console import Console

from deploy.terminal.fetch_progress import show_fetch
from deploy.terminal.lines import fact
from workers.models.catalog import CATALOG, default_home, is_present, resolve_model

_COLUMNS = "{:<17}{:>8}  {:<8}"


def fetch(
    environ: Mapping[str, str],
    name: Annotated[
        str,
        typer.Argument(
            help="A name from `paceline models list`, or of Hugging Face's hub: org/name."
        ),
    ],
) -> None:
    """Fetch a model into the cache and check what is there. The last line is its folder."""
    with show_fetch(Console(stderr=True), name) as progress:
        files = resolve_model(name, home=default_home(environ), progress=progress, thorough=True)
    typer.echo(files.folder)


def list_models(environ: Mapping[str, str]) -> None:
    """List the models known by name, their size on disk, and whether they are in the cache.

    Besides these, a model may be a checkpoint's folder, or a name on Hugging Face's hub.
    """
    console = Console(highlight=False)
    fact(console, _COLUMNS.format("name", "on disk", "cached"), "what it is")
    for entry in CATALOG.values():
        size = f"{entry.disk_bytes / 1e6:.0f} MB"
        cached = "yes" if is_present(entry, home=default_home(environ)) else "no"
        fact(console, _COLUMNS.format(entry.name, size, cached), entry.about)


SUBCOMMANDS = {"fetch": fetch, "list": list_models}

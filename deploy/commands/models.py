"""`paceline models fetch NAME` and `paceline models list`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from deploy.fetch_progress import show_fetch
from workers.models import CATALOGUE, default_home, is_present, resolve_model


def add_commands(app: typer.Typer, environ: Mapping[str, str]) -> None:
    """Add `models` to the command tree. The cache folder is that of `environ`."""
    home = default_home(environ)
    models = typer.Typer(help="Demo models in the cache.", no_args_is_help=True)
    app.add_typer(models, name="models")

    @models.command("fetch")
    def fetch(
        name: Annotated[str, typer.Argument(help="A name of `paceline models list`.")],
    ) -> None:
        """Bring a model into the cache, checking what is there; the last line is its folder."""
        with show_fetch(Console(stderr=True), name) as progress:
            files = resolve_model(name, home=home, progress=progress, thorough=True)
        typer.echo(files.folder)

    @models.command("list")
    def list_models() -> None:
        """The models known by name, their size on disk, and whether the cache holds them."""
        table = Table("name", "size", "in the cache", "what it is", box=None)
        for entry in CATALOGUE.values():
            present = "yes" if is_present(entry, home=home) else "no"
            table.add_row(entry.name, f"{entry.disk_bytes / 1e6:.0f} MB", present, entry.about)
        Console(soft_wrap=True).print(table)

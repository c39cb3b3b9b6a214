"""`paceline config check`: all mistakes of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from cluster.config.load import load_config, mistakes
from cluster.config.model import Config
from paceline.errors import PacelineError
from paceline.text import counted
from workers.models.catalog import CATALOG, default_home, resolve_model
from workers.models.hub import is_hub_name


def check(
    environ: Mapping[str, str],
    path: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", help="TOML file. Default: only the environment."),
    ] = None,
) -> None:
    """Name all mistakes of a configuration, a line each. Exit code 2: there are some.

    Nothing is fetched or started: it looks at keys, at their values, at what fits together, and
    for folders of models on this host.
    """
    found = mistakes(path, environ)
    if not found:
        found = _missing_models(load_config(path, environ), default_home(environ))
    for line in found:
        typer.echo(f"error: {line}", err=True)
    if found:
        typer.echo(counted(len(found), "mistake"), err=True)
        raise typer.Exit(2)
    typer.echo(f"{path or 'the configuration'}: no mistakes")


SUBCOMMANDS = {"check": check}


def _missing_models(config: Config, home: Path) -> list[str]:
    found = []
    for name in dict.fromkeys([config.target.model, *(one.model for one in config.drafters)]):
        if name is None or name in CATALOG or is_hub_name(name):
            continue  # It would be fetched.
        try:
            resolve_model(name, home=home)
        except PacelineError as error:
            found.append(str(error))
    return found

"""`paceline batch`: answers OpenAI's batch file on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import typer
from rich.console import Console

from cluster.config.model import Config
from deploy.batch.command import batch_command
from deploy.cli.reach import reach_cluster
from paceline.access import Access


def add_commands(app: typer.Typer, environ: Mapping[str, str]) -> None:
    """Add `batch` to the command tree."""

    def reach(
        config: Config, console: Console, server: str | None, access: Access
    ) -> AbstractContextManager[str]:
        return reach_cluster(config, environ, console=console, server=server, access=access)

    app.command("batch")(batch_command(environ, reach))

"""`paceline apply`: changes the cluster of `paceline up` while it serves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from cluster.config.load import load_config
from deploy.session.cluster import check_models, deployment_of
from deploy.session.record import alone, read_record, write_record
from paceline.errors import UnavailableError
from workers.models.catalog import default_home


def add_commands(app: typer.Typer, environ: Mapping[str, str]) -> None:
    """Add `apply` to the command tree."""

    @app.command("apply")
    def apply(
        config: Annotated[Path, typer.Argument(help="TOML file.")],
    ) -> None:
        """Change the drafters and defaults of the cluster of `paceline up`. Requests continue."""
        settings = load_config(config, environ)
        home = default_home(environ)
        with alone(home, "apply"):
            record = read_record(home)
            if record is None:
                raise UnavailableError("nothing is up; start a cluster with `paceline up`")
            check_models(settings, home=home)
            with deployment_of(record) as handle:
                if handle is None:
                    raise UnavailableError(
                        f"the deployment at {record.address} is gone; clean up with `paceline down`"
                    )
                done = handle.apply(settings)
            write_record(home, replace(record, deployment=settings.deployment()))
        for line in done or ["nothing has changed"]:
            typer.echo(line)

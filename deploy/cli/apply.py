"""`paceline apply`: changes a deployment while it serves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.config.load import load_config
from cluster.config.model import Config
from deploy.session.cluster import check_models, deployment_of, on_ray, running_ray
from deploy.session.record import alone, read_record, write_record
from paceline.errors import UnavailableError
from workers.models.catalog import default_home

if TYPE_CHECKING:
    from cluster.placement.launch import ClusterHandle


def apply(
    environ: Mapping[str, str],
    config: Annotated[Path, typer.Argument(help="TOML file.")],
) -> None:
    """Change drafters, target groups and defaults of a deployment that serves.

    Requests continue.

    It is the cluster of `paceline up`, or, with server.name, the deployment of this name on the
    Ray cluster at RAY_ADDRESS, such as a job.
    """
    settings = load_config(config, environ)
    home = default_home(environ)
    name = settings.server.name
    with alone(home, "apply"):
        record = read_record(home)
        if record is not None and name in (None, record.name):
            check_models(settings, home=home)
            with deployment_of(record) as handle:
                done = _applied(handle, settings, gone=f"the deployment at {record.address}")
            write_record(home, replace(record, deployment=settings.deployment()))
        elif name is None:
            raise UnavailableError(
                "nothing is up: start a cluster with `paceline up`, or give the deployment's "
                "name in server.name"
            )
        else:
            done = _apply_to_named(name, settings, home, environ)
    for line in done or ["nothing has changed"]:
        typer.echo(line)


def _apply_to_named(
    name: str, settings: Config, home: Path, environ: Mapping[str, str]
) -> list[str]:
    address = running_ray(environ)
    if address is None:
        raise UnavailableError(
            f"no Ray cluster is running that could have {name!r}: set RAY_ADDRESS to its address"
        )
    check_models(settings, home=home)
    with on_ray(address, name) as handle:
        gone = f"{name!r} is not on the Ray cluster at {address}, or it"
        return _applied(handle, settings, gone=gone)


def _applied(handle: ClusterHandle | None, settings: Config, *, gone: str) -> list[str]:
    if handle is None:
        raise UnavailableError(f"{gone} is gone; `paceline down` cleans up after `paceline up`")
    return handle.apply(settings)

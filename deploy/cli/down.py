"""`paceline down`: ends what `paceline up` started, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from deploy.session import ray_head
from deploy.session.cluster import enter_ray
from deploy.session.record import ClusterRecord, alone, read_record, remove_record
from deploy.terminal.options import (
    drain_option,
)
from paceline.errors import UnavailableError
from paceline.text import counted
from workers.models.catalog import default_home


def down(
    environ: Mapping[str, str],
    drain: Annotated[float, drain_option("Give running requests this long to end.")] = 0.0,
) -> None:
    """End the cluster of `paceline up`. No error if there is none or parts of it are dead."""
    home = default_home(environ)
    with alone(home, "down"):
        record = read_record(home)
        if record is None:
            typer.echo("nothing is up")
            return
        end(record, home, drain=drain)
    typer.echo("down")


def end(record: ClusterRecord, home: Path, *, drain: float) -> None:
    """End what the record names, and remove it. `drain`: seconds for running requests."""
    if record.head is None or (drain and ray_head.is_listening(record.ray_address)):
        _end_on(record, drain=drain)
    if record.head is not None:
        ray_head.stop_head(record.head)
    remove_record(home)


def _end_on(record: ClusterRecord, *, drain: float) -> None:
    """End the deployment on a Ray cluster, our own or another, if both still exist."""
    try:
        leave = enter_ray(record.ray_address, record.head)
    except UnavailableError:
        typer.echo(f"the Ray cluster at {record.ray_address} is gone, with everything on it")
        return
    from cluster.placement.launch import find_cluster

    handle = find_cluster(record.name)
    left = 0 if handle is None else handle.stop(drain)
    if left:
        were = "was" if left == 1 else "were"
        typer.echo(f"{counted(left, 'request')} did not end within {drain:g} s and {were} cut off")
    if leave is not None:
        leave()

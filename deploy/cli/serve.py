"""`paceline serve MODEL`: serves a model until a signal, in the foreground."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deploy.cli.down import end
from deploy.cli.up import start_checked, tell_where
from deploy.session import ray_head
from deploy.session.record import ClusterRecord, alone, read_record
from deploy.session.signals import ending_on_signals, signals_held
from deploy.terminal.options import (
    DeploymentFlags,
    drain_option,
)
from paceline.errors import InvalidRequestError, UnavailableError
from workers.models.catalog import default_home

_LOOK_SECONDS = 2.0


def serve(
    environ: Mapping[str, str],
    *,
    flags: DeploymentFlags,
    drain: Annotated[
        float, drain_option("On SIGTERM or Ctrl-C, give running requests this long to end.")
    ] = 0.0,
    address: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve a model over HTTP and gRPC until a signal.

    It is `paceline up` in the foreground; `paceline gateway` is the HTTP interface alone.
    """
    if address is not None:
        raise InvalidRequestError(
            "address", "the HTTP interface of servers that run is `paceline gateway --address`"
        )
    config = flags.load(environ)
    if config.is_pool:
        raise InvalidRequestError("config", "is a pool of drafters: start it with `paceline up`")
    home, console = default_home(environ), Console(stderr=True)
    began = time.monotonic()
    with ending_on_signals(drain):
        record, guard = start_checked(config, environ, console, stays=False)
        try:
            tell_where(console, config, record, time.monotonic() - began)
            typer.echo(record.address)
            _wait_while_it_serves(record, home)
        finally:
            with signals_held():
                _end(record, home, drain)
                if guard is not None:
                    guard.close()


def _wait_while_it_serves(record: ClusterRecord, home: Path) -> None:
    """Return if it was ended by `paceline down`. Raise UnavailableError if its Ray cluster ends."""
    while ray_head.is_listening(record.ray_address):
        time.sleep(_LOOK_SECONDS)
    if read_record(home) == record:
        raise UnavailableError(
            f"the Ray cluster at {record.ray_address} has ended; logs: {record.logs}"
        )


def _end(record: ClusterRecord, home: Path, drain: float) -> None:
    """End it, unless `paceline down` has done so or is doing so."""
    try:
        with alone(home, "down"):
            present = read_record(home)
            if present is not None and present.ray_address == record.ray_address:
                end(present, home, drain=drain)
    except UnavailableError:
        if read_record(home) is not None:
            raise

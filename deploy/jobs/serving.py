"""Runs a deployment until the job is stopped; then drains, and ends what it had started.

It stays in the foreground. The deployment is its own: all of it ends with this process, even if it
is killed.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.config.load import load_config
from deploy.session.cluster import check_models, enter_ray, running_ray
from deploy.session.signals import ending_on_signals, signals_held
from deploy.terminal.options import drain_option
from paceline.errors import ConfigError, DeadlineError, UnavailableError
from paceline.text import counted
from workers.models.catalog import default_home
from workers.process.logs import new_run

if TYPE_CHECKING:
    from cluster.placement.launch import ClusterHandle

_LOOK_SECONDS = 2.0
_CONTROLLER_PATIENCE = 60.0
"""How long the controller may not answer, while its node is busy, before it is started again."""


def serve(
    config: Annotated[
        Path | None, typer.Argument(help="TOML file; without it, the local demo.")
    ] = None,
    config_option: Annotated[
        Path | None, typer.Option("--config", help="The same, as other commands have it.")
    ] = None,
    drain: Annotated[
        float, drain_option("When the job is stopped, give running requests this long to end.")
    ] = 30.0,
) -> None:
    """Serve on the Ray cluster that runs this job until the job is stopped."""
    if config is not None and config_option is not None:
        raise ConfigError(f"two configurations: {config} and {config_option}; name one")
    settings = load_config(config or config_option, os.environ)
    home = default_home(os.environ)
    address = running_ray(os.environ, _log)
    if address is None:
        raise UnavailableError(
            "no Ray cluster is running: submit this with `ray job submit`, or use `paceline up`"
        )
    with ending_on_signals(drain):
        enter_ray(address)
        from cluster.placement.launch import disconnect, start_cluster

        try:
            check_models(settings, home=home)
            logs = new_run(home)
            _log(f"logs in {logs}, on each worker's host")
            cluster = start_cluster(
                settings,
                home=home,
                logs=logs,
                progress=_log,
                detached=False,
                name=None,
            )
            try:
                if cluster.http_address is not None:
                    scheme = "https" if settings.server.tls_cert else "http"
                    _log(f"gateway: HTTP at {scheme}://{cluster.http_address}/v1")
                _watch(cluster)
            finally:
                with signals_held():
                    _end(cluster, drain)
        finally:
            disconnect()


def _watch(cluster: ClusterHandle) -> None:
    """Say where it serves, and again when that changes.

    Requests do not need the controller. One that does not answer is started again, and what it
    started continues. Raises WorkerLostError if it has ended for good, as only `stop` ends it.
    """
    said = ""
    answered = time.monotonic()
    while True:
        try:
            address = cluster.present_address()
        except DeadlineError as error:
            if time.monotonic() - answered > _CONTROLLER_PATIENCE:
                _log(f"{error}, for {_CONTROLLER_PATIENCE:g} s: it is started again")
                cluster.restart_controller()
                answered = time.monotonic()
            continue
        answered = time.monotonic()
        if address != said:
            _log(f"serving: gRPC at {address}")
            said = address
        time.sleep(_LOOK_SECONDS)


def _end(cluster: ClusterHandle, drain: float) -> None:
    _log(f"ending: running requests have {drain:g} s")
    if left := cluster.stop(drain):
        _log(f"{counted(left, 'request')} did not end in time: cut off")


def _log(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()

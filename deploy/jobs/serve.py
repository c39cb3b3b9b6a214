"""Runs a deployment as a Ray job. When the job is stopped, everything that it started ends.

    ray job submit --working-dir . -- python -m deploy.jobs.serve [--config C]

It stays in the foreground. Its workers are not detached: they end with this process, even if it is
killed.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from cluster.config.load import load_config
from deploy.session.cluster import check_models, enter_ray, running_ray
from deploy.session.signals import ending_on_signals, signals_held
from deploy.terminal.usage import run_app
from paceline.errors import UnavailableError, WorkerLostError
from workers.models.catalog import default_home
from workers.process.logs import new_run

_LOOK_SECONDS = 2.0


def serve(
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML file; without it, the local demo.")
    ] = None,
) -> None:
    """Serve on the Ray cluster that runs this job until the job is stopped."""
    settings = load_config(config, os.environ)
    home = default_home(os.environ)
    address = running_ray(os.environ, _log)
    if address is None:
        raise UnavailableError(
            "no Ray cluster is running: submit this with `ray job submit`, or use `paceline up`"
        )
    with ending_on_signals():
        enter_ray(address, own=False)
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
                said = ""
                while workers := cluster.workers():
                    # The driver is on another node if its own was lost.
                    address = workers[-1].address or cluster.address
                    if address != said:
                        _log(f"serving: gRPC at {address}")
                        said = address
                    time.sleep(_LOOK_SECONDS)
                raise WorkerLostError("the controller no longer has workers")
            finally:
                with signals_held():
                    cluster.stop()
        finally:
            disconnect()


def _log(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    job = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    job.command()(serve)
    sys.exit(run_app(lambda: job, "deploy.jobs.serve"))

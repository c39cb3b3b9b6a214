"""What a pod of the chart does before it ends: `python -m deploy.jobs.leave --seconds 60`.

Kubernetes takes a pod that ends out of its Services, so new callers go elsewhere. This waits until
the callers that are connected to the pod's HTTP port have their answers, and then ends Ray here.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Annotated

import psutil
import typer

from deploy.terminal.usage import run_app

HTTP_PORT = 8000
"""That of Serve's proxy in the chart."""
SETTLE_SECONDS = 5.0
"""How long it may take until all proxies of the cluster know that this pod ends."""
_LOOK_SECONDS = 0.5


def leave(
    seconds: Annotated[
        float, typer.Option(min=0, help="upper bound on the wait for connected callers")
    ] = 60.0,
    grace: Annotated[int, typer.Option(min=1, help="seconds that Ray's processes have")] = 30,
) -> None:
    """Wait for the callers of this pod's HTTP port, then end Ray on this pod."""
    until = time.monotonic() + seconds
    time.sleep(min(SETTLE_SECONDS, seconds))
    while (callers := num_callers(HTTP_PORT)) and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
    sys.stdout.write(f"ending Ray: {callers} connections to port {HTTP_PORT} are open\n")
    sys.stdout.flush()
    os.execvp("ray", ("ray", "stop", "--grace-period", str(grace)))


def num_callers(port: int) -> int:
    """The number of open connections to `port` of this host, or pod."""
    return sum(
        one.status == psutil.CONN_ESTABLISHED and one.laddr.port == port
        for one in psutil.net_connections("tcp")
    )


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(leave)
    sys.exit(run_app(lambda: app, "deploy.jobs.leave"))

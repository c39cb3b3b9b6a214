"""Answers OpenAI's batch file as a Ray job.

    ray job submit --working-dir . -- python -m deploy.jobs.batch --input /F --output /F

Its flags are those of `paceline batch`. Submitted again, it does what is missing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.session.packages import check_python
from deploy.session.signals import ending_on_signals

if TYPE_CHECKING:
    from rich.console import Console

    from cluster.config.model import Config
    from paceline.access import Access


def main() -> None:
    check_python("deploy.jobs.batch")
    import typer

    from deploy.batch.run import batch
    from deploy.terminal.usage import as_command, run_app

    with ending_on_signals():
        job = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        own = {"environ": os.environ, "reach": _reach, "check_path": _check_path}
        job.command()(as_command(batch, **own))
        sys.exit(run_app(lambda: job, "deploy.jobs.batch"))


@contextmanager
def _reach(
    config: Config,
    environ: Mapping[str, str],
    *,
    console: Console,
    server: str | None,
    access: Access,
) -> Iterator[str]:
    """The server of this job: the named one, or one on the Ray cluster that runs the job."""
    from deploy.session.cluster import open_cluster, running_ray
    from deploy.terminal.lines import plain
    from paceline.errors import UnavailableError
    from workers.models.catalog import default_home

    def tell(line: str) -> None:
        plain(console, line)

    if server is None and running_ray(environ, tell) is None:
        raise UnavailableError(
            "no Ray cluster is running: submit this with `ray job submit`, use `paceline batch`, "
            "or name a server with --server"
        )
    home = default_home(environ)
    with open_cluster(
        config, home=home, progress=tell, server=server, console=console, access=access
    ) as cluster:
        yield cluster.address


def _check_path(flag: str, path: Path) -> None:
    """Refuse a file in the job's working folder, which Ray removes."""
    from paceline.errors import InvalidRequestError

    if not path.is_absolute():
        raise InvalidRequestError(
            flag, f"expected an absolute path, got {path}: Ray removes a job's working folder"
        )


if __name__ == "__main__":
    main()

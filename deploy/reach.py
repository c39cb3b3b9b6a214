"""A server for a command to talk to: the one named, the running one, or a private one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from cluster.config import Config
from deploy.fetch_progress import show_fetch
from workers.models import default_home, resolve_model


@contextmanager
def reach_cluster(
    config: Config, environ: Mapping[str, str], *, console: Console, server: str | None
) -> Iterator[str]:
    """Yield HOST:PORT of an InferenceService (deploy/session.py says which).

    Models that a private cluster needs are fetched first, and what goes on is told on `console`:
    in one changing line where it is a terminal, else a line each.
    """
    from deploy.session import open_cluster

    home = default_home(environ)
    if server is None:
        fetch_models(config, environ, console=console)
    with console.status("starting") as status:

        def show(message: str) -> None:
            if console.is_terminal:
                status.update(message)
            else:
                console.print(message, markup=False, highlight=False, soft_wrap=True)

        with open_cluster(config, home=home, progress=show, server=server) as cluster:
            status.stop()
            yield cluster.address
            status.start()


def fetch_models(config: Config, environ: Mapping[str, str], *, console: Console) -> None:
    """Bring what `config` names into the cache. Raises CheckpointError, ModelFetchError."""
    names = [config.target.model, *(drafter.model for drafter in config.drafters)]
    for name in dict.fromkeys(name for name in names if name is not None):
        with show_fetch(console, name) as progress:
            resolve_model(name, home=default_home(environ), progress=progress)


def target_folder(config: Config, environ: Mapping[str, str]) -> Path:
    """The checkpoint whose text is served. Raises CheckpointError, ModelFetchError."""
    return resolve_model(config.target.model, home=default_home(environ)).folder

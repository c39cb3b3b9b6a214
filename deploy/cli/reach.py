"""Finds a server for a command: the named one, the running one, or a private one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console

from cluster.config.model import Config
from deploy.terminal.lines import plain
from paceline.access import Access
from paceline.errors import UnavailableError
from workers.models.catalog import default_home, resolve_model

LONG_WORK_SECONDS = 20.0
"""Time between two lines of what takes minutes."""


@contextmanager
def reach_cluster(
    config: Config,
    environ: Mapping[str, str],
    *,
    console: Console,
    server: str | None,
    access: Access | None = None,
) -> Iterator[str]:
    """Yield HOST:PORT of an InferenceService. deploy/session/cluster.py describes which one.

    Progress is shown on `console`.
    """
    from deploy.session.cluster import open_cluster

    home = default_home(environ)
    with teller(console) as tell, ExitStack() as stack:
        cluster = stack.enter_context(
            open_cluster(
                config, home=home, progress=tell, server=server, console=console, access=access
            )
        )
        tell.rest()
        yield cluster.address


def running_server(environ: Mapping[str, str], hint: str = "") -> str:
    """Address of the cluster of `up`, whatever its configuration. Raises UnavailableError.

    `hint`: what else could be done.
    """
    from deploy.session import ray_head
    from deploy.session.cluster import present_record

    record = present_record(default_home(environ))
    if record is None or record.address is None or not ray_head.is_listening(record.address):
        raise UnavailableError(
            "no server is running: name one with --server, start one with `paceline up`"
            + (f", {hint}" if hint else "")
        )
    return record.address


class Teller:
    """Shows progress: in one changing line on a terminal, else as lines, not too many."""

    def __init__(
        self, console: Console, *, every: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`every`: without a terminal, the least seconds between two lines. Of the messages in
        between, none is shown.
        """
        self._console = console
        self._status = console.status("")
        self._every = every
        self._clock = clock
        self._told_at = -math.inf

    def __call__(self, message: str) -> None:
        if self._console.is_terminal and not self._console.quiet:
            self._status.update(message)
            self._status.start()
        elif self._clock() - self._told_at >= self._every:
            self._told_at = self._clock()
            plain(self._console, message)

    def rest(self) -> None:
        """Remove the changing line until the next message."""
        self._status.stop()


@contextmanager
def teller(console: Console, *, every: float = 0.0) -> Iterator[Teller]:
    """A teller whose line is removed at the end of the block. `every`: see Teller."""
    tell = Teller(console, every=every)
    try:
        yield tell
    finally:
        tell.rest()


def target_folder(config: Config, environ: Mapping[str, str]) -> Path:
    """The checkpoint whose text is served. Raises CheckpointError, ModelFetchError."""
    return resolve_model(config.target.model, home=default_home(environ)).folder

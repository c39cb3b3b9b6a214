"""`paceline logs`: the logs of the workers of `paceline up` on this host."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from deploy.session.record import read_record
from paceline.errors import InvalidRequestError, UnavailableError
from paceline.text import did_you_mean
from workers.models.catalog import default_home

_LOOK_SECONDS = 0.5


def logs(
    environ: Mapping[str, str],
    worker: Annotated[
        str | None, typer.Argument(help="Such as driver or shard-0. Default: all of them.")
    ] = None,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="Last lines of each.")] = 20,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Then show new lines until Ctrl-C.")
    ] = False,
) -> None:
    """Show the end of the workers' logs: of what is up, or of the last run here."""
    run = _run(default_home(environ))
    files = {path.stem: path for path in sorted(run.glob("*.log"))}
    if worker is not None:
        if worker not in files:
            known = ", ".join(files) or "no logs"
            raise InvalidRequestError(
                "worker", f"{run} has {known}, not {worker!r}{did_you_mean(worker, files)}"
            )
        files = {worker: files[worker]}
    ends = {}
    for name, path in files.items():
        with path.open("rb") as stream:
            for line in deque(stream, lines):
                _show(name, line, alone=len(files) == 1)
            ends[name] = stream.tell()
    typer.echo(f"logs: {run}", err=True)
    while follow:
        time.sleep(_LOOK_SECONDS)
        for name, path in files.items():
            ends[name] = _show_new(name, path, ends[name], alone=len(files) == 1)


def _run(home: Path) -> Path:
    """The folder of logs of what is up, else of what was up last."""
    record = read_record(home)
    if record is not None and Path(record.logs).is_dir():
        return Path(record.logs)
    runs = sorted(path for path in (home / "logs").glob("*") if path.is_dir())
    if not runs:
        raise UnavailableError(
            f"there are no logs in {home / 'logs'}: nothing was started from this host"
        )
    return runs[-1]


def _show_new(name: str, path: Path, end: int, *, alone: bool) -> int:
    """Show the whole lines beyond `end`. Returns where they end."""
    if path.stat().st_size < end:  # A new file has begun.
        end = 0
    with path.open("rb") as stream:
        stream.seek(end)
        for line in stream:
            if not line.endswith(b"\n"):
                break
            end += len(line)
            _show(name, line, alone=alone)
    return end


def _show(name: str, line: bytes, *, alone: bool) -> None:
    shown = line.decode(errors="replace").rstrip("\n")
    typer.echo(shown if alone else f"{name}: {shown}")

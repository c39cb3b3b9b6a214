"""$PACELINE_HOME/run/cluster.json records what `paceline up` started, for the other commands."""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal

from deploy.session.ray_head import RayHead
from paceline.errors import UnavailableError
from workers.process.atomic_files import replaced

Command = Literal["up", "down", "apply"]

_COMMANDS: Mapping[str, Command] = {"down": "down", "apply": "apply"}
_MOMENT = 0.05


@dataclass(frozen=True, slots=True)
class ClusterRecord:
    """A deployment of `up`.

    `address`: of InferenceService; None while it starts, "" of a pool of drafters.
    `deployment`: Config.deployment of its configuration. `head`: our own Ray head; None: the Ray
    cluster at `ray_address` is not ours. `name`: of the controller there. `logs`: the folder of
    its logs, on each of its hosts. `http_address`: of its HTTP interface; None: it has none.
    """

    name: str
    address: str | None
    deployment: Mapping[str, Any]
    ray_address: str
    head: RayHead | None
    logs: str
    http_address: str | None = None


def read_record(home: Path) -> ClusterRecord | None:
    """The record; None: there is none. Raises UnavailableError if it cannot be read."""
    path = _path(home)
    try:
        fields = json.loads(path.read_text())
        head = fields.pop("head")
        return ClusterRecord(**fields, head=None if head is None else RayHead(**head))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UnavailableError(
            f"{path} is not a record of this version ({error}); if no cluster runs, remove it"
        ) from None


def write_record(home: Path, record: ClusterRecord) -> None:
    """Write the record, whole or not at all. Raises UnavailableError, as on a full disk."""
    path = _path(home)
    with _told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path, mode=0o600) as beside:
            beside.write_text(json.dumps(asdict(record), indent=2) + "\n")


def remove_record(home: Path) -> None:
    """Remove the record. No error if there is none."""
    _path(home).unlink(missing_ok=True)


@contextmanager
def alone(home: Path, command: Command) -> Iterator[None]:
    """Hold the lock of `up`, `down` and `apply`. Raises UnavailableError if it is held."""
    path = _lock_path(home)
    with _told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("a+")
    with stream:
        if not _locked(stream, fcntl.LOCK_EX):
            raise UnavailableError(
                f"another `paceline {_written(stream)}` is at work; wait until it is done"
            )
        stream.truncate(0)
        stream.write(command)
        stream.flush()
        yield


def at_work(home: Path) -> Command | None:
    """Which of `up`, `down` and `apply` holds the lock now; None: none."""
    try:
        with _lock_path(home).open() as stream:
            return None if _locked(stream, fcntl.LOCK_SH) else _written(stream)
    except OSError:
        return None


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turn an OSError in the block into UnavailableError: `path` cannot be written."""
    try:
        yield
    except OSError as error:
        raise UnavailableError(
            f"cannot write {path} ({error.strerror}): make room there, or set PACELINE_HOME to "
            "another folder"
        ) from None


def _locked(stream: IO[str], kind: int) -> bool:
    """Whether the lock was free. Tries twice, because `at_work` holds it for a moment."""
    for pause in (_MOMENT, 0.0):
        try:
            fcntl.flock(stream, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(pause)
    return False


def _written(stream: IO[str]) -> Command:
    """The command that the holder wrote; `up` if it has not written yet."""
    stream.seek(0)
    return _COMMANDS.get(stream.read(), "up")


def _path(home: Path) -> Path:
    return home / "run" / "cluster.json"


def _lock_path(home: Path) -> Path:
    return _path(home).with_suffix(".lock")

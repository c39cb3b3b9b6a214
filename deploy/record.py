"""$PACELINE_HOME/run/cluster.json: what `paceline up` started, for `status`, `down` and clients."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from deploy.ray_head import RayHead
from paceline.errors import UnavailableError


@dataclass(frozen=True, slots=True)
class ClusterRecord:
    """A deployment of `up`.

    `address`: of InferenceService, None while it is coming up. `head`: ours, None where the Ray
    cluster at `ray_address` is somebody else's. `name`: of the controller on it.
    """

    name: str
    address: str | None
    deployment_digest: str
    ray_address: str
    head: RayHead | None


def read_record(home: Path) -> ClusterRecord | None:
    """What is recorded, or None. Raises UnavailableError where it cannot be read."""
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
    """Record it, whole or not at all."""
    path = _path(home)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(record), indent=2) + "\n")
    partial.chmod(0o600)
    os.replace(partial, path)


def remove_record(home: Path) -> None:
    """Forget it. No error where there is none."""
    _path(home).unlink(missing_ok=True)


@contextmanager
def alone(home: Path) -> Iterator[None]:
    """Hold the lock of `up` and `down`. Raises UnavailableError when another one has it."""
    path = _path(home).with_suffix(".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UnavailableError(
                "another `paceline up` or `paceline down` is at work; wait until it is done"
            ) from None
        yield


def _path(home: Path) -> Path:
    return home / "run" / "cluster.json"

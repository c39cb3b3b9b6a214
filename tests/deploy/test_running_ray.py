"""The note that Ray leaves of a running cluster, in a folder that all users share."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import session
from deploy.session import running_ray

NOBODY = 65534


@pytest.fixture
def note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Names an address at which something listens; this user alone could have written it."""
    path = tmp_path / "ray_current_cluster"
    monkeypatch.setattr(session, "FOUND_BY_RAY", path)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        path.write_text(f"127.0.0.1:{listening.getsockname()[1]}")
        path.chmod(0o644)
        yield path


def told(note: Path) -> str:
    said: list[str] = []
    assert running_ray({}, said.append) is None
    return "".join(said)


def test_a_note_of_this_user_is_believed(note: Path) -> None:
    assert running_ray({}) == note.read_text()
    assert running_ray({"RAY_ADDRESS": "elsewhere:1"}) == "elsewhere:1"


@pytest.mark.parametrize("mode", [0o666, 0o664])
def test_a_note_that_others_can_write_is_not(note: Path, mode: int) -> None:
    note.chmod(mode)
    assert "RAY_ADDRESS" in told(note)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_a_note_of_another_user_is_not(note: Path) -> None:
    os.chown(note, NOBODY, NOBODY)
    assert "RAY_ADDRESS" in told(note)


def test_a_link_is_not_followed(note: Path) -> None:
    real = note.with_name("real")
    note.rename(real)
    note.symlink_to(real)
    assert told(note) == ""


def test_a_pipe_is_not_waited_for(note: Path) -> None:
    note.unlink()
    os.mkfifo(note)
    assert told(note) == ""

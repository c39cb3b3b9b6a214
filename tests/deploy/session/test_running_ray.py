"""The note that Ray leaves about a running cluster, in a folder that all users share."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.session import cluster as session
from deploy.session.cluster import running_ray
from tests.deploy.shell import ROOT

NOBODY = 65534
JOIN_OWN_HEAD = """
import os
from deploy.session.ray_head import prepare_to_join, start_head, stop_head
head = start_head(num_cpus=1)
try:
    prepare_to_join(head)
    from cluster.placement.launch import connect, disconnect
    assert os.environ["RAY_AUTH_MODE"] == "token"
    connect(head.address)
    disconnect()
finally:
    stop_head(head)
"""


@pytest.fixture
def note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A note with an address at which something listens. Only this user could have written it."""
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


@pytest.mark.ray
def test_a_token_of_the_users_for_ray_does_not_lock_us_out(tmp_path: Path) -> None:
    """`ray.init()` leaves a token for good, and a head that finds one requires it."""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("0" * 64)
    environment = dict(os.environ) | {"HOME": str(tmp_path)}
    del environment["RAY_AUTH_MODE"]
    done = subprocess.run(
        [sys.executable, "-c", JOIN_OWN_HEAD],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr

"""What our own Ray head is started with, and which processes count as its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from deploy.session import ray_head
from deploy.session.ray_head import is_running, plan_head, stop_head
from paceline.errors import UnavailableError
from tests.deploy.conftest import becomes_true

FREEZER = Path("/sys/fs/cgroup/freezer")
_LEADER_WITH_CHILD = """
import subprocess, sys
child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("gpus", [False, True])
def test_gpus_are_kept_from_ray_unless_they_are_wanted(gpus: bool) -> None:
    command = ray_head._command(plan_head(), num_cpus=2, gpus=gpus)
    assert ("--num-gpus=0" in command) is not gpus


@contextlib.contextmanager
def session(token: str | None = None) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """The first process of a session, and another one in it. Both end with the block."""
    environment = dict(os.environ) | ({} if token is None else {"PACELINE_RAY_HEAD": token})
    with subprocess.Popen(
        [sys.executable, "-c", _LEADER_WITH_CHILD],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as leader:
        assert leader.stdout is not None
        child = psutil.Process(int(leader.stdout.readline()))
        try:
            yield leader, child
        finally:
            with contextlib.suppress(psutil.Error):
                child.kill()
            leader.kill()


def lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


@pytest.mark.parametrize("leader_lives", [True, False])
def test_the_processes_of_somebody_else_are_left_alone(leader_lives: bool) -> None:
    """One of them has the pid of the head's first process, perhaps from before a reboot."""
    with session() as (leader, child):
        stale = replace(plan_head(), processes=[(leader.pid, 1.0e9)])
        if not leader_lives:
            leader.kill()
            leader.wait()
        assert not is_running(stale)
        stop_head(stale)
        assert lives(child)
        assert (leader.poll() is None) is leader_lives


def test_a_head_is_ended_by_its_plan_alone() -> None:
    """As if its starter was killed before it could write down more."""
    head = plan_head()
    with session(head.token) as (leader, child):
        first = psutil.Process(leader.pid)
        stop_head(head)
        assert not lives(child)
        assert not lives(first)


@pytest.mark.ray
@pytest.mark.long
def test_what_outlives_the_first_process_of_a_head_is_ended_as_well() -> None:
    """Ray's agents do so for some seconds, and have overwritten their own environment."""
    for _ in range(3):
        head = ray_head.start_head(num_cpus=1)
        processes = ray_head._processes_of(head, set())
        assert any("Agent" in " ".join(process.cmdline()) for process in processes)
        psutil.Process(head.processes[0][0]).kill()
        stop_head(head)
        assert [process for process in processes if lives(process)] == []


def test_a_session_is_ended_to_its_last_process_though_that_hides_whose_it_is() -> None:
    head = plan_head()
    with session() as (leader, child):
        first = psutil.Process(leader.pid)
        head = replace(head, processes=[(first.pid, first.create_time())])
        assert is_running(head)
        stop_head(head)
        assert not lives(child)
        assert not lives(first)


@pytest.fixture
def frozen_group() -> Iterator[Path]:
    """A control group whose processes survive SIGKILL until it is thawed (state D)."""
    group = FREEZER / f"paceline-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"needs root and the freezer of cgroup v1: {error}")
    try:
        yield group
    finally:
        (group / "freezer.state").write_text("THAWED")
        assert becomes_true(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


def test_a_process_that_sigkill_does_not_end_is_reported_and_not_waited_for(
    frozen_group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_head, "KILL_SECONDS", 1.0)
    head = plan_head()
    Path(head.folder).mkdir()
    with session(head.token) as (_, child):
        (frozen_group / "cgroup.procs").write_text(str(child.pid))
        (frozen_group / "freezer.state").write_text("FROZEN")
        with pytest.raises(UnavailableError, match=rf"has ended except for {child.pid} \(sleep, "):
            stop_head(head)
        assert Path(head.folder).exists()
        (frozen_group / "freezer.state").write_text("THAWED")
        stop_head(head)
        assert not lives(child)
        assert not Path(head.folder).exists()

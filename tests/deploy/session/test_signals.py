"""Signals while a command runs: it ends in time with its exit code, and leaves nothing."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.deploy.conftest import becomes_true
from tests.deploy.shell import ROOT, Shell, tiny_config
from tests.release import at_release

_STUBBORN = """
import sys
from deploy.session import signals
signals.LONGEST_UNWINDING = 1.0
with signals.ending_on_signals():
    print("ready", flush=True)
    while True:
        try:
            {body}
        except BaseException:
            pass
"""
_BODIES = {
    "what swallows every exception": "import time; time.sleep(600)",
    "what does not come back to Python": (
        "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 1 << 31)"
    ),
}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("body", _BODIES)
def test_no_library_can_keep_a_command_from_ending(body: str, number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _STUBBORN.format(body=_BODIES[body])],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(timeout=60) == 128 + number


_CRASHING = """
import atexit, os, time
from deploy.session.signals import ending_on_signals
atexit.register(os.abort)
with ending_on_signals(), ending_on_signals():
    print("ready", flush=True)
    time.sleep(600)
"""


def test_a_library_that_crashes_when_python_ends_does_not_change_the_exit_code() -> None:
    """Ray does now and then, if a signal interrupts it while it connects."""
    with subprocess.Popen(
        [sys.executable, "-c", _CRASHING], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 128 + signal.SIGTERM


# What `up` says before each part of its work; None: nothing yet. CI has two of the moments.
_MOMENTS = [
    (signal.SIGTERM, None, 0.1),
    (signal.SIGINT, None, 0.1),
    (signal.SIGTERM, None, 2.0),
    (signal.SIGTERM, "Ray: starting", 0.5),
    (signal.SIGINT, "Ray: starting", 4.0),
    (signal.SIGTERM, "Ray: starting", 8.0),
    (signal.SIGTERM, "shard-0: loading", 0.2),
    (signal.SIGINT, "shard-0: loading", 4.0),
    (signal.SIGKILL, "Ray: starting", 1.0),
    (signal.SIGKILL, "shard-0: loading", 1.0),
]


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("moments", [_MOMENTS[3::6], *at_release([_MOMENTS])], ids=len)
def test_up_that_is_interrupted_leaves_nothing_and_the_next_one_works(
    shell: Shell, tmp_path: Path, moments: list[tuple[signal.Signals, str | None, float]]
) -> None:
    """The signals come at random moments, each a few seconds after a line of `up`."""
    config = tiny_config(tmp_path)
    luck = random.Random(15)
    for number, said, longest in moments:
        with subprocess.Popen(
            [sys.executable, "-m", "deploy.cli", "up", str(config)],
            cwd=ROOT,
            env=shell.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as up:
            assert up.stderr is not None
            told = [] if said is None else [next(line for line in up.stderr if said in line)]
            time.sleep(luck.uniform(0.0, longest))
            up.send_signal(number)
            rest, told_last = up.communicate(timeout=240)
        case = f"{number.name} within {longest} s of {said}: {told}{told_last}"
        # Before the command's first line, the signal ends Python itself; with 1 if it is SIGINT
        # while Python imports its own modules.
        early = (-number, 1) if said is None and "deploy" not in told_last else (-number,)
        assert up.returncode in (128 + number, *early), case
        assert rest == "", case
        assert becomes_true(lambda: not shell.processes()), case
        assert list(shell.temporary.glob("paceline-*")) == [], case
        if number != signal.SIGKILL:  # whose record the next `up` forgets
            shell.assert_nothing_is_left()

    again = shell.run("up", str(config))
    assert again.returncode == 0, again.stderr
    assert shell.run("down").returncode == 0
    shell.assert_nothing_is_left()

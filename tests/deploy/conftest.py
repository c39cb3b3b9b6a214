"""A running server for commands, and a way to call commands."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.cli.__main__ import main
from tests.deploy.shell import ROOT, Shell


@dataclass(frozen=True)
class Served:
    """A server of a tiny model, its checkpoint and the configuration that names it."""

    address: str
    checkpoint: Path
    config: Path


@dataclass(frozen=True)
class Called:
    code: int
    stdout: str
    stderr: str


Call = Callable[..., Called]


def becomes_true(condition: Callable[[], object], seconds: float = 120.0) -> bool:
    """Whether a condition becomes true in time. The time is long even for a busy host."""
    give_up = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    with subprocess.Popen(
        [sys.executable, "-m", "tests.deploy.serve_tiny", str(folder)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        address = process.stdout.readline().strip()
        assert address, "the system did not start"
        checkpoint = folder / "target"
        config = folder / "tiny.toml"
        config.write_text(
            f'[target]\nmodel = "{checkpoint}"\n\n[[drafters]]\nmodel = "{folder / "drafter"}"\n'
        )
        try:
            yield Served(address, checkpoint, config)
        finally:
            process.stdin.close()
            process.wait(timeout=120)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Call `paceline` with arguments, in this process."""

    def run(*arguments: object) -> Called:
        monkeypatch.setattr(sys, "argv", ["paceline", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        code = ended.value.code
        assert code is None or isinstance(code, int)
        return Called(code or 0, shown.out, shown.err)

    return run


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    # It holds Unix sockets, so its path must be short.
    temporary = Path(tempfile.mkdtemp(prefix="pl", dir="/tmp"))
    shell = Shell(tmp_path / "home", temporary)
    try:
        yield shell
    finally:
        for pid in shell.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(temporary, ignore_errors=True)

"""Run the `paceline` command as a user does, with its own home and temporary files."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from tests.tiny import make_tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 240.0
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def tiny_config(folder: Path) -> Path:
    """A configuration of a tiny target and an n-gram drafter, at any free port."""
    target = make_tiny_checkpoint(folder / "target")
    path = folder / "tiny.toml"
    path.write_text(
        f'[target]\nmodel = "{target}"\nkv_memory = "8MiB"\nthreads = 1\n'
        '[[drafters]]\nkind = "ngram"\n[server]\ngrpc_port = 0\nhttp_port = 0\n'
    )
    return path


class Shell:
    """Runs the command with its own home and folder for temporary files."""

    def __init__(self, home: Path, temporary: Path, ray_address: str | None = None) -> None:
        self.home = home
        self.temporary = temporary
        self.environment = os.environ | {
            "PACELINE_HOME": str(home),
            "TMPDIR": str(temporary),
        }
        if ray_address is not None:
            self.environment["RAY_ADDRESS"] = ray_address

    def run(
        self, *arguments: str, pass_fds: tuple[int, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "deploy.cli", *arguments],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            pass_fds=pass_fds,
        )

    def processes(self) -> list[int]:
        """Pids of living processes that were started with this home."""
        mark = f"PACELINE_HOME={self.home}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def assert_nothing_is_left(self) -> None:
        left = self.processes()
        assert not left, f"left are {left}"
        assert list(self.temporary.glob("paceline-*")) == []
        assert not (self.home / "run" / "cluster.json").exists()


def shown_by(script: str, given: bytes, columns: str, on_terminal: bool) -> str:
    """What a Python script prints into a pipe, or on a terminal of `columns` columns."""
    own, others = pty.openpty() if on_terminal else os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": columns, "TERM": "xterm"},
        stdin=subprocess.PIPE,
        stdout=others,
    ) as process:
        os.close(others)
        assert process.stdin is not None
        process.stdin.write(given)
        process.stdin.close()
        shown = b""
        with contextlib.suppress(OSError):  # how a terminal ends
            while part := os.read(own, 65536):
                shown += part
        os.close(own)
    assert process.returncode == 0
    return _COLOURS.sub("", shown.decode())

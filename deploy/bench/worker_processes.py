"""Workers as processes of a benchmark, without Ray."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from paceline.errors import UnavailableError

_END_SECONDS = 5.0


class WorkerProcess:
    """A module that prints an address a line once it serves (workers/standalone.py)."""

    def __init__(self, module: str, arguments: Sequence[str], *, log: Path) -> None:
        """`log`: where its stderr goes."""
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def addresses(self, count: int) -> list[str]:
        """The next `count` addresses that it prints. Blocks. Raises UnavailableError if it ends."""
        assert self._process.stdout is not None
        found = []
        for _ in range(count):
            line = self._process.stdout.readline().strip()
            if not line:
                tail = self._log.read_text(encoding="utf-8", errors="replace").strip()[-400:]
                raise UnavailableError(f"a worker ended as it started: {tail}")
            found.append(line)
        return found

    def end(self) -> None:
        """SIGTERM, and SIGKILL where that does not help."""
        self._process.terminate()
        try:
            self._process.wait(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


class WorkerProcesses:
    """Processes that end with the block; `start` of a subclass launches them."""

    def __init__(self, log_folder: Path) -> None:
        self._log_folder = log_folder
        self._stack = ExitStack()

    def start(self) -> None:
        """Launch them."""
        raise NotImplementedError

    def launch(self, name: str, module: str, arguments: Sequence[str]) -> WorkerProcess:
        """A process of the block; `name` is of its log."""
        process = WorkerProcess(module, arguments, log=self._log_folder / f"{name}.log")
        self._stack.callback(process.end)
        return process

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

"""A process of a benchmark that answers one JSON request a line with one JSON line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from paceline.errors import UnavailableError


class LineProcess:
    """Starts `python -m MODULE ARGUMENTS`; an idle one waits on a pipe and takes no time."""

    def __init__(
        self, module: str, arguments: Sequence[str], *, name: str, threads: int, log: Path
    ) -> None:
        """`name` is for people; what the process writes on standard error goes to `log`."""
        self._name = name
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            )

    def ask(self, task: Mapping[str, object]) -> dict[str, Any]:
        """Send a task and await its answer. Raises UnavailableError when the process is gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            tail = self._log.read_text(encoding="utf-8", errors="replace").strip()[-400:]
            raise UnavailableError(f"{self._name}'s process ended: {tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def answer_lines(
    make_answer: Callable[[], Callable[[Mapping[str, Any]], Mapping[str, object]]],
) -> None:
    """The process's side: answer the tasks of stdin until it ends.

    `make_answer` is called once what libraries print can no longer mix with the answers.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    answer = make_answer()
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")
        answers.flush()

"""Where a worker's log is: PACELINE_HOME/logs/RUN/WORKER.log, on the worker's own host.

A run is one start of a deployment. Each file is bounded and turned over (WORKER.log.1 is older);
old runs are removed. A log never fails what is logged about: lines that a full disk does not take
are counted, and their number is told once there is room. A line says when, how grave, which worker
and, where the caller gave `extra={"request_id": ...}`, which request.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import logging
import os
import shutil
import sys
import threading
import time
from dataclasses import dataclass
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import TracebackType

FILE_BYTES = 4 * 1024 * 1024
"""Bytes of one file. A day's warnings are some kilobytes; a repeated traceback takes hours."""
OLDER_FILES = 2
"""Files that are kept of a worker besides the one it writes."""
KEPT_RUNS = 10
"""Runs that are kept on a host besides those that still run."""
PAUSE_SECONDS = 5.0
"""After a line that could not be written, none is tried for so long: trying costs time."""

_LOCK = ".in-use"
_log = logging.getLogger(__name__)


def new_run(home: Path) -> Path:
    """The folder of a run that begins now. It appears when a worker opens its log."""
    return home / "logs" / f"{time.strftime('%Y-%m-%dT%H-%M-%S')}-{os.getpid()}"


@dataclass(frozen=True, slots=True)
class WorkerLog:
    """The log of one worker. `takes_stderr`: what it says on stderr goes there too.

    That is where libraries of C++ say why they end a process.
    """

    run: Path
    worker: str
    takes_stderr: bool = False

    @property
    def path(self) -> Path:
        """The file that is written now."""
        return self.run / f"{self.worker}.log"

    def open(self) -> None:
        """Have all that this process logs written there, its last words at a crash included.

        Where that cannot be, stderr is told and the process goes on.
        """
        try:
            self.run.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(self.run / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_SH)  # to the end of this process
            _remove_old_runs(self.run)
        except OSError as error:
            _log.warning("no log can be kept in %s: %s", self.run, error)
        handler = BoundedFile(self.path, takes_crashes=True, takes_stderr=self.takes_stderr)
        handler.setFormatter(_Formatter(self.worker))
        root = logging.getLogger()
        root.addHandler(handler)
        if not self.takes_stderr:  # else it would be there twice
            root.addHandler(_Stderr(logging.WARNING))
        sys.excepthook = _on_uncaught
        threading.excepthook = _on_uncaught_in_thread


class BoundedFile(RotatingFileHandler):
    """Writes lines as long as the disk takes them.

    `takes_crashes`: Python's own word at a crash of this process goes there too.
    """

    def __init__(
        self,
        path: Path,
        *,
        takes_crashes: bool = False,
        takes_stderr: bool = False,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        super().__init__(
            path,
            maxBytes=file_bytes,
            backupCount=OLDER_FILES,
            encoding="utf-8",
            errors="backslashreplace",
            delay=True,
        )
        self._takes_crashes, self._takes_stderr = takes_crashes, takes_stderr
        self._for_crashes: int | None = None
        self._again_at = 0.0
        self._num_lost = 0
        with contextlib.suppress(OSError):  # the first line will tell
            self.stream = self._open()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, or count it as lost."""
        if time.monotonic() < self._again_at:
            self._num_lost += 1
            return
        lost = self._num_lost
        super().emit(record)
        if lost and self._num_lost == lost:
            self._num_lost = 0
            super().emit(
                _log.makeRecord(
                    *(_log.name, logging.WARNING, __file__, 0),
                    *("%d lines before this one could not be written", (lost,), None),
                )
            )

    def handleError(self, record: logging.LogRecord) -> None:
        """A line could not be written: let some time pass, then open the file anew."""
        self._num_lost += 1
        self._again_at = time.monotonic() + PAUSE_SECONDS
        stream, self.stream = self.stream, None
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()

    def _open(self) -> TextIOWrapper:
        stream = super()._open()
        if self._takes_crashes:  # by a file of its own: this one is closed now and then
            before, self._for_crashes = self._for_crashes, os.dup(stream.fileno())
            faulthandler.enable(self._for_crashes)
            if before is not None:
                os.close(before)
        if self._takes_stderr:
            os.dup2(stream.fileno(), 2)
        return stream


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Lines for whoever reads this process's stderr. One that cannot be written is dropped."""

    def __init__(self, level: int) -> None:
        super().__init__()
        self.setLevel(level)

    def handleError(self, record: logging.LogRecord) -> None:
        pass


class _Formatter(logging.Formatter):
    def __init__(self, worker: str) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03d %(levelname)s {worker}%(request)s %(name)s: %(message)s",
            datefmt="%Y-%m-%dT%H:%M:%S",
        )

    def format(self, record: logging.LogRecord) -> str:
        request_id = getattr(record, "request_id", None)
        # A caller chose it: it shall not look like a line of its own.
        record.request = "" if request_id is None else f" request={ascii(str(request_id))[1:-1]}"
        return super().format(record)


def _on_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    _log.critical("an error ended this process", exc_info=(kind, error, trace))


def _on_uncaught_in_thread(hook: threading.ExceptHookArgs) -> None:
    if hook.exc_value is not None:
        name = "?" if hook.thread is None else hook.thread.name
        error = (hook.exc_type, hook.exc_value, hook.exc_traceback)
        _log.critical("an error ended the thread %s", name, exc_info=error)


def _remove_old_runs(present: Path) -> None:
    """Of runs that have ended the newest are kept; their names tell their age.

    Nothing is removed but folders that a run has marked as its own.
    """
    runs = sorted((one.parent for one in present.parent.glob(f"*/{_LOCK}")), reverse=True)
    ended = [one for one in runs if one != present and not _is_in_use(one)]
    for run in ended[KEPT_RUNS:]:
        shutil.rmtree(run, ignore_errors=True)


def _is_in_use(run: Path) -> bool:
    try:
        with (run / _LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False

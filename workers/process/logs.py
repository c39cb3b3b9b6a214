"""A worker's log: PACELINE_HOME/logs/RUN/WORKER.log, on the worker's own host.

A run is one start of a deployment. Each file has a maximum size and is rotated (WORKER.log.1 is
older); old runs are removed. A worker continues if its log fails: lines that a full disk refuses
are counted, and their number is logged once there is room. A line has the time, level and worker,
and the request's id if the logging call has `extra={"request_id": ...}`. Lines may also be JSON
objects; then `extra={"fields": {...}}` adds to them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import logging
import os
import shutil
import sys
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import TracebackType

FILE_BYTES = 4 * 1024 * 1024
"""Maximum bytes of one file. The warnings of a day take some kilobytes; a traceback that repeats
fills the file in hours.
"""
OLDER_FILES = 2
"""Number of older files that are kept per worker."""
KEPT_RUNS = 10
"""Number of ended runs that are kept on a host."""
PAUSE_SECONDS = 5.0
"""Seconds without another try after a line that could not be written, since a try costs time."""

ACCESS = "paceline.access"
"""The logger of the requests of a gateway, a line each, at the level INFO. Only JSON has them."""

SELDOM_LINES, SELDOM_SECONDS = 5, 10.0
"""A SeldomLog writes at most this many lines in this many seconds."""

_LOCK = ".in-use"
_log = logging.getLogger(__name__)


def new_run(home: Path) -> Path:
    """The folder of a run that begins now. It is created when a worker opens its log."""
    return home / "logs" / f"{time.strftime('%Y-%m-%dT%H-%M-%S')}-{os.getpid()}"


@dataclass(frozen=True, slots=True)
class WorkerLog:
    """The log of one worker. `takes_stderr`: whether the process's stderr goes to the log too.

    A C++ library that ends a process writes the reason to stderr. `is_json`: each line is a JSON
    object, but for what comes from stderr or from a crash.
    """

    run: Path
    worker: str
    takes_stderr: bool = False
    is_json: bool = False

    @property
    def path(self) -> Path:
        return self.run / f"{self.worker}.log"

    def open(self) -> None:
        """Write all that this process logs to the file, including the traceback of a crash.

        If the file cannot be written, a warning goes to stderr and the process continues.
        """
        try:
            self.run.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(self.run / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_SH)  # until this process ends
            _remove_old_runs(self.run)
        except OSError as error:
            _log.warning("no log can be kept in %s: %s", self.run, error)
        handler = BoundedFile(self.path, takes_crashes=True, takes_stderr=self.takes_stderr)
        handler.setFormatter(json_lines(self.worker) if self.is_json else _Formatter(self.worker))
        root = logging.getLogger()
        root.addHandler(handler)
        if not self.takes_stderr:  # otherwise each line would be there twice
            root.addHandler(_Stderr(logging.WARNING))
        sys.excepthook = _on_uncaught
        threading.excepthook = _on_uncaught_in_thread


class BoundedFile(RotatingFileHandler):
    """A log file of bounded size. Lines that the disk refuses are counted, and raise no error.

    `takes_crashes`: Python's traceback of a crash goes to the file too. `takes_stderr`: so does the
    process's stderr.
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
        with contextlib.suppress(OSError):  # the first line will report it
            self.stream = self._open()

    def emit(self, record: logging.LogRecord) -> None:
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
        """Handle a line that could not be written: wait PAUSE_SECONDS, then open the file again."""
        self._num_lost += 1
        self._again_at = time.monotonic() + PAUSE_SECONDS
        stream, self.stream = self.stream, None
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()

    def _open(self) -> TextIOWrapper:
        stream = super()._open()
        if self._takes_crashes:  # with a descriptor of its own, since this file is sometimes closed
            before, self._for_crashes = self._for_crashes, os.dup(stream.fileno())
            faulthandler.enable(self._for_crashes)
            if before is not None:
                os.close(before)
        if self._takes_stderr:
            os.dup2(stream.fileno(), 2)
        return stream


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]  # generic only in stubs
    """Lines for readers of this process's stderr. A line that cannot be written is dropped."""

    def __init__(self, level: int) -> None:
        super().__init__()
        self.setLevel(level)

    def handleError(self, record: logging.LogRecord) -> None:
        pass


class SeldomLog:
    """Writes warnings that others can cause to a logger, at a bounded rate.

    The first line after a pause tells how many were left out.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._began = -SELDOM_SECONDS
        self._lines = self._left_out = 0

    def warning(self, text: str, *arguments: object) -> None:
        now = time.monotonic()
        if now - self._began >= SELDOM_SECONDS:
            self._began, self._lines = now, 0
        if self._lines >= SELDOM_LINES:
            self._left_out += 1
            return
        self._lines += 1
        if self._left_out:
            self._log.warning("%d similar lines were left out", self._left_out)
            self._left_out = 0
        self._log.warning(text, *arguments)


def json_lines(process: str) -> logging.Formatter:
    """The format of JSON lines. Has this process log requests too."""
    logging.getLogger(ACCESS).setLevel(logging.INFO)
    return _JsonLines(process)


class _JsonLines(logging.Formatter):
    """`time` (UTC), `level`, `process`, `logger`, `message`; `request_id` and `exception` if known;
    and the fields of `extra={"fields": ...}`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request_id := getattr(record, "request_id", None)) is not None:
            told["request_id"] = str(request_id)
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told | getattr(record, "fields", {}), default=str)


class _Formatter(logging.Formatter):
    def __init__(self, worker: str) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03d %(levelname)s {worker}%(request)s %(name)s: %(message)s",
            datefmt="%Y-%m-%dT%H:%M:%S",
        )

    def format(self, record: logging.LogRecord) -> str:
        request_id = getattr(record, "request_id", None)
        # A caller chose the id, so escape line breaks: it must not look like a line of its own.
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
    """Remove ended runs except the newest ones, judged by name.

    Only folders that a run has marked as its own are removed.
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

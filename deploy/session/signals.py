"""How a command ends on a signal: it unwinds its blocks, and all clean-up runs to the end."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

LONGEST_UNWINDING = 60.0
"""The longest time in seconds from a signal to the end of the process. Python handles a signal only
between two of its instructions, so a library may swallow it or never return to Python. The guard
(deploy/session/ray_head.py) ends what such a process leaves behind."""

_ENDING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def ending_on_signals(drain: float = 0.0) -> Iterator[None]:
    """Let SIGTERM unwind the block as Ctrl-C does. The exit code is 143, or 130 for Ctrl-C.

    The process ends within LONGEST_UNWINDING seconds of the first signal, whatever the block does.
    After the outermost such block it ends at once: a library that was interrupted half-way, such as
    Ray while it connects, may crash when Python takes it down. `drain`: seconds that it has
    besides, to let requests end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _SignalWatch(LONGEST_UNWINDING + drain) as watch:
        before = signal.signal(signal.SIGTERM, _unwind)
        try:
            yield
        finally:
            if signal.getsignal(signal.SIGTERM) is _unwind:
                signal.signal(signal.SIGTERM, before)
            # Libraries such as Ray may have turned the signal into an error of their own.
            if (number := watch.end()) is not None:
                if watch.is_outermost:
                    _end_at_once(_exit_code(number))
                raise SystemExit(_exit_code(number)) from None


@contextmanager
def signals_held() -> Iterator[None]:
    """Do not let another Ctrl-C or SIGTERM interrupt a clean-up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_signals() -> None:
    """Ignore signals until this process ends, because its work is done and should stay."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)


class _SignalWatch:
    """A thread that sees signals at once, even while the main thread runs no Python code."""

    def __init__(self, longest: float) -> None:
        self._longest = longest

    def __enter__(self) -> _SignalWatch:
        self._received: int | None = None
        self._has_ended = threading.Event()
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def is_outermost(self) -> bool:
        """Whether nothing else watched signals when this began."""
        return self._before == -1

    def end(self) -> int | None:
        """Stop watching. Returns the first signal; None: none came."""
        if not self._has_ended.is_set():
            self._has_ended.set()
            signal.set_wakeup_fd(self._before)
            os.close(self._writing)
            self._thread.join()
            os.close(self._reading)
            if self._received is not None and not self.is_outermost:
                os.write(self._before, bytes([self._received]))  # Who watched before hears of it.
        return self._received

    def _watch(self) -> None:
        while numbers := os.read(self._reading, 64):
            ending = [number for number in numbers if number in _ENDING]
            if ending and self._received is None:
                self._received = ending[0]
                if not self._has_ended.wait(self._longest):
                    os._exit(_exit_code(self._received))


def _unwind(number: int, frame: FrameType | None) -> None:
    raise SystemExit(_exit_code(number))


def _end_at_once(code: int) -> NoReturn:
    """End this process without atexit handlers and destructors of C++ libraries."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # Its reader may be gone.
            stream.flush()
    os._exit(code)


def _exit_code(number: int) -> int:
    return 128 + number

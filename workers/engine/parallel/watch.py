"""Watches over a rank whose device waits for other ranks: frees the device, or ends the process.

A collective on a GPU waits on the device, for as long as another rank stays away. Meanwhile the
host may be in a call that returns only when the device goes on. So threads of their own notice that
a rank is lost, or that work takes too long. They free the device (`release`), and the host's call
then fails. If the work does not end soon after that either, the process ends: its device cannot be
used any more, and a new process is started.

To notice at once that a rank is lost, each rank waits for a word of the next one, around in a
circle. A rank says it when it leaves or has heard it. If its process dies, the connection breaks
instead.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch

from workers.process.threads import EXIT_BROKEN

_FAREWELL = 1
"""The tag of the word."""
FOREVER = timedelta(days=365)
"""The time after which a connection for farewells gives up."""

_log = logging.getLogger(__name__)


def end_process(reason: str) -> None:
    """End this process at once, as a broken one. Other threads may be stuck."""
    _log.critical("this process ends: %s", reason)
    os._exit(EXIT_BROKEN)


class Watch:
    """Two threads that watch one meeting of the ranks.

    `lost` is the reason why the group is lost, or None while it is not.
    """

    def __init__(
        self,
        members: Any,
        *,
        rank: int,
        degree: int,
        release: Callable[[], None],
        patience: float,
        end: Callable[[str], None] = end_process,
    ) -> None:
        """`members`: torch's process group on CPUs, whose connections have the deadline FOREVER.

        `release` frees the device from waiting; it is called once, in a thread. `patience`: seconds
        that watched work may take after that, before `end` is called.
        """
        self.lost: str | None = None
        self._members = members
        self._previous, self._next = (rank - 1) % degree, (rank + 1) % degree
        self._release = release
        self._patience = patience
        self._end = end
        self._changed = threading.Condition()
        self._deadline: float | None = None
        self._why = ""
        self._closed = False
        self._word: tuple[object, ...] = ()
        self._listens = degree > 1
        for work in (self._keep_time, self._listen) if self._listens else (self._keep_time,):
            _start(work)

    @contextmanager
    def over(self, seconds: float, what: str) -> Iterator[None]:
        """Watch the work in this context, which may take `seconds`. Contexts do not nest."""
        assert self._deadline is None
        with self._changed:
            is_lost = self.lost is not None
            self._why = self.lost or f"{what} took longer than {seconds:g} s"
            self._deadline = time.monotonic() + (self._patience if is_lost else seconds)
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._deadline = None
                self._changed.notify()

    def close(self) -> None:
        """Stop watching, and tell the rank that listens to this one."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify()
            self._pass_on()

    def _pass_on(self) -> None:
        """Tell the rank that listens to this one that the group is lost, once."""
        if self._listens and not self._word:
            word = torch.zeros(1)
            self._word = (word,)
            # It need not be awaited. The tensor is kept until it is sent.
            with suppress(RuntimeError):  # the other rank is gone, too
                self._word = word, self._members.send([word], self._previous, _FAREWELL)

    def _listen(self) -> None:
        try:
            self._members.recv([torch.zeros(1)], self._next, _FAREWELL).wait()
            reason = f"rank {self._next} has left"
        except RuntimeError as error:
            reason = f"rank {self._next} is lost: {(str(error) or 'no reason').splitlines()[0]}"
        with self._changed:
            self._lose(reason)

    def _lose(self, reason: str) -> None:
        """Note that the group is lost, and release the device. Later reasons do not count."""
        if self._closed or self.lost is not None:
            return
        self.lost = self._why = reason
        self._pass_on()
        if self._deadline is not None:
            self._deadline = time.monotonic() + self._patience
            self._changed.notify()
        _start(self._release)  # it may itself wait for the device

    def _keep_time(self) -> None:
        with self._changed:
            while not self._closed:
                left = None if self._deadline is None else self._deadline - time.monotonic()
                if left is None or left > 0:
                    self._changed.wait(left)
                elif self.lost is None:
                    self._lose(self._why)
                else:
                    self._end(f"{self._why}; {self._patience:g} s later the device still waited")
                    return


def _start(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="watch over ranks", daemon=True).start()

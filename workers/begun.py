"""A coroutine that runs at once up to its first wait, and is awaited later.

A task would begin it in the next turn of the event loop, and tell its end in one turn more. Between
a verdict and the next step such turns are a part of the target's gap.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class Begun(Generic[Result]):
    """Await it once, from a task, or `cancel` it. It must wait for futures of the event loop alone.

    Whatever it raises comes when it is awaited.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Result]) -> None:
        self._coroutine = coroutine
        self._waits_for: asyncio.Future[Any] | None = None
        self._end: Exception | None = None
        self._resume(None)

    def __await__(self) -> Generator[Any, None, Result]:
        while self._end is None:
            thrown: BaseException | None = None
            if self._waits_for is None or not self._waits_for.done():
                try:
                    yield self._waits_for
                except BaseException as error:
                    thrown = error
            self._resume(thrown)
        if not isinstance(self._end, StopIteration):
            raise self._end
        result: Result = self._end.value
        return result

    def cancel(self) -> None:
        """Nobody awaits it any more."""
        if self._waits_for is not None:
            self._waits_for.cancel()
        self._coroutine.close()

    def _resume(self, thrown: BaseException | None) -> None:
        """Run to the next wait, or to the end, which is kept."""
        try:
            if thrown is None:
                self._waits_for = self._coroutine.send(None)
            else:
                self._waits_for = self._coroutine.throw(thrown)
        except Exception as end:
            self._end = end

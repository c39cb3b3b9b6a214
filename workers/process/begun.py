"""A coroutine that runs at once up to its first wait, and is awaited later.

An asyncio task starts its coroutine one turn of the event loop later, and reports its end another
turn later. Between a verdict and the next step, those turns would make the target idle for longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class Begun(Generic[Result]):
    """Runs a coroutine at once, up to its first wait. Await it once, from a task, or `cancel` it.

    The coroutine may wait only for futures of the event loop. If the coroutine raises an exception,
    awaiting this object raises the same one.
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
        """Close the coroutine. Call it if the result will not be awaited."""
        if self._waits_for is not None:
            self._waits_for.cancel()
        self._coroutine.close()

    def _resume(self, thrown: BaseException | None) -> None:
        """Run to the next wait or to the end. The end, by return or exception, is kept."""
        try:
            if thrown is None:
                self._waits_for = self._coroutine.send(None)
            else:
                self._waits_for = self._coroutine.throw(thrown)
        except Exception as end:
            self._end = end

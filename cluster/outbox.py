"""Messages on their way into one gRPC stream, in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

MessageT = TypeVar("MessageT")


class Outbox(Generic[MessageT]):
    """Takes messages without waiting; writes them one after the other.

    `run` is the stream's writer. Whoever reads the stream may `flush` instead of waking the writer,
    which saves a turn of the event loop. Nobody else may: a cancelled write ends the stream.
    """

    def __init__(self, write: Callable[[MessageT], Awaitable[None]]) -> None:
        self._write = write
        self._messages: deque[MessageT] = deque()
        self._woken = asyncio.Event()
        self._writing = False

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: MessageT) -> None:
        """Append a message; `wake` or `flush` must follow."""
        self._messages.append(message)

    def wake(self) -> None:
        """Have the writer write what is there."""
        self._woken.set()

    async def flush(self) -> None:
        """Write what is there, unless that is being done already."""
        if self._writing:
            return
        self._writing = True
        try:
            while self._messages:
                await self._write(self._messages.popleft())
        finally:
            self._writing = False

    async def run(self) -> None:
        """Write whenever woken, for ever."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            await self.flush()

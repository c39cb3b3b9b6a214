"""Messages to be written to one gRPC stream, in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from workers.process.begun import Begun

MessageT = TypeVar("MessageT", bound=Message)


class Outbox(Generic[MessageT]):
    """Takes messages without waiting and writes them one after the other.

    `run` is the stream's writer. The reader of the stream may `begin` and `flush` instead of waking
    the writer, which saves turns of the event loop. Nobody else may, because a cancelled write ends
    the stream.
    """

    def __init__(self, write: Callable[[MessageT], Coroutine[Any, Any, None]]) -> None:
        self._write = write
        # With their sizes. The size of a message that need not wait is not computed.
        self._messages: deque[tuple[MessageT, int]] = deque()
        self.num_bytes = 0
        """Bytes of the messages that wait behind another."""
        self._woken = asyncio.Event()
        self._writing = False
        self._begun: Begun[None] | None = None

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: MessageT) -> None:
        """Append a message. `wake`, `begin` or `flush` must follow."""
        size = message.ByteSize() if self._messages else 0
        self.num_bytes += size
        self._messages.append((message, size))

    def _next(self) -> MessageT:
        message, size = self._messages.popleft()
        self.num_bytes -= size
        return message

    def wake(self) -> None:
        """Have the writer write all messages."""
        self._woken.set()

    def begin(self) -> None:
        """Hand the first message to gRPC, unless one is being written. `flush` must follow."""
        if not self._writing:
            self._writing = True
            self._begun = Begun(self._write(self._next()))

    async def flush(self) -> None:
        """Write all messages, unless that is being done already."""
        begun, self._begun = self._begun, None
        if self._writing and begun is None:
            return
        self._writing = True
        try:
            if begun is not None:
                await begun
            while self._messages:
                await self._write(self._next())
        finally:
            self._writing = False

    async def run(self) -> None:
        """Write whenever woken, forever."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            await self.flush()

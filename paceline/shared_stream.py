"""Many requests of one client over one GenerateMany stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from itertools import count
from typing import Any

import grpc

from paceline.generation import Finished, GenerateEvent
from paceline.inference_wire import event_from_wire, failure_from_wire
from paceline.v1 import inference_pb2, inference_pb2_grpc

CLOSE_SECONDS = 1.0
"""How long the server may take to end a stream that its client has ended."""

_Answers = asyncio.Queue["inference_pb2.NumberedResponse | grpc.RpcError"]


class SharedStream:
    """Begins with its first request and is of no more use once it broke."""

    def __init__(self, stub: inference_pb2_grpc.InferenceServiceAsyncStub, address: str) -> None:
        self.broken: grpc.RpcError | None = None
        """Why it ended, if it did."""
        self._address = address
        open_call: Any = stub.GenerateMany
        self._call = open_call()
        self._numbers = count(1)
        self._answers: dict[int, _Answers] = {}
        # Written by a task of its own: a cancelled write would end the stream.
        self._requests: asyncio.Queue[inference_pb2.GenerateManyRequest | None] = asyncio.Queue()
        self._tasks = (asyncio.create_task(self._read()), asyncio.create_task(self._write()))

    async def stream(self, request: inference_pb2.GenerateRequest) -> AsyncGenerator[GenerateEvent]:
        """What comes of a request. Closing it cancels the request.

        Raises what it ended with; grpc.RpcError where the stream broke.
        """
        number = next(self._numbers)
        answers = self._answers[number] = _Answers()
        self._send(inference_pb2.GenerateManyRequest(number=number, begin=request))
        try:
            if self.broken is not None:
                raise self.broken
            while True:
                answer = await answers.get()
                if isinstance(answer, grpc.RpcError):
                    raise answer
                if answer.HasField("failed"):
                    del self._answers[number]
                    raise failure_from_wire(answer.failed, self._address)
                event = event_from_wire(answer.response)
                if isinstance(event, Finished):
                    del self._answers[number]
                    yield event
                    return
                yield event
        finally:
            if self._answers.pop(number, None) is not None:
                cancel = inference_pb2.CancelRequest()
                self._send(inference_pb2.GenerateManyRequest(number=number, cancel=cancel))

    async def close(self) -> None:
        """End the stream and its requests, in good order where the server answers in time."""
        self._break(_ended(grpc.StatusCode.CANCELLED, "the client was closed"))
        await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _send(self, message: inference_pb2.GenerateManyRequest) -> None:
        if self.broken is None:
            self._requests.put_nowait(message)

    async def _write(self) -> None:
        try:
            while (request := await self._requests.get()) is not None:
                await self._call.write(request)
            await self._call.done_writing()
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # The reader is told why.

    async def _read(self) -> None:
        try:
            async for message in self._call:
                for answer in message.responses:
                    answers = self._answers.get(answer.number)
                    if answers is not None:  # else nobody listens any more
                        answers.put_nowait(answer)
            self._break(_ended(grpc.StatusCode.UNAVAILABLE, "the server ended the stream"))
        except grpc.RpcError as error:
            self._break(error)

    def _break(self, error: grpc.RpcError) -> None:
        if self.broken is not None:
            return
        self.broken = error
        self._requests.put_nowait(None)
        for answers in self._answers.values():
            answers.put_nowait(error)


def _ended(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, nothing, nothing, details=details, debug_error_string="")

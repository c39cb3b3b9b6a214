"""The drivers' gRPC services in front of several drivers: calls pass through as they are.

Messages are forwarded as bytes. A unary call and a stream of answers need no code of their own, so
a new RPC of a service in SERVICES is forwarded without a change here. Requests for text are read
once, to choose a driver (cluster/gateway/drivers.py), and those of a GenerateMany stream are
divided among the drivers. Deadlines, cancellation, status codes, and metadata in both directions,
such as the caller's key, pass through. A driver that is lost before the first token of a request is
replaced by another, as for HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from cluster.access.gate import CALLER, CallGuard, Gate, tenant_of
from cluster.gateway.drivers import Driver, DriverPool
from paceline.channel import CALLERS
from paceline.chat import Chat, Message
from paceline.errors import InvalidRequestError, PacelineError, UnavailableError
from paceline.generation import GenerateInput
from paceline.limits import MAX_MESSAGES, MAX_SAMPLES
from paceline.status import DETAILS_KEY, error_of, status_of
from paceline.v1 import inference_pb2, trace_pb2
from paceline.wire.answers import failure_to_wire
from workers.process.certificate import Certificate
from workers.process.server import RunningServer, start_server

SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
    trace_pb2.DESCRIPTOR.services_by_name["TraceService"],
)

MAX_KEPT_BYTES = 64 * 1024 * 1024
"""Most bytes of a stream's requests that are kept until their first tokens, to be sent to another
driver if theirs is lost. A request beyond that ends with its driver."""

REPORT_SECONDS = 0.2
"""Time between two looks whether a driver serves, for the health service."""

_OWN_METADATA = ("grpc-", ":", "user-agent", "content-type", "te")
"""Beginnings of keys that belong to one connection and are not forwarded."""

_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""Statuses of a stream to a driver that is lost. Others are about the caller, who gets them."""

_Context = grpc.aio.ServicerContext[Any, Any]
_Metadata = tuple[tuple[str, str | bytes], ...]


async def serve_grpc(
    pool: DriverPool,
    *,
    host: str,
    port: int = 0,
    gate: Gate | None = None,
    certificate: Certificate | None = None,
) -> RunningServer:
    """Serve the drivers' services. Its health is SERVING while a driver serves.

    `gate`: who may call; None: everybody whom the drivers let in. They also count what a caller
    uses. `certificate`: for TLS; None: plain text. Raises UnavailableError if the port cannot be
    bound.
    """
    front = GrpcFront(pool)
    server = await start_server(
        front.add,
        host=host,
        port=port,
        serving=False,
        keepalive=CALLERS,
        interceptors=() if gate is None else (CallGuard(gate),),
        credentials=None if certificate is None else certificate.for_grpc(),
    )

    async def report() -> None:
        while True:
            server.report(serving=pool.serves())
            await asyncio.sleep(REPORT_SECONDS)

    reporting = asyncio.create_task(report())

    async def end() -> None:
        reporting.cancel()

    server.on_stop(end)
    return server


class GrpcFront:
    def __init__(self, pool: DriverPool) -> None:
        self._pool = pool

    def add(self, server: grpc.aio.Server) -> Sequence[str]:
        for service in SERVICES:
            handlers = {
                method.name: self._handler(f"/{service.full_name}/{method.name}", method)
                for method in service.methods
            }
            generic = grpc.method_handlers_generic_handler(service.full_name, handlers)
            server.add_generic_rpc_handlers((generic,))
        return [service.full_name for service in SERVICES]

    def _handler(self, path: str, method: Any) -> Any:
        if method.client_streaming:
            assert method.name == "GenerateMany", f"{path} needs a way to divide its messages"
            return grpc.stream_stream_rpc_method_handler(self._many)
        if not method.server_streaming:

            async def unary(request: bytes, context: _Context) -> bytes:
                return await self._unary(path, request, context)

            return grpc.unary_unary_rpc_method_handler(unary)

        async def stream(request: bytes, context: _Context) -> None:
            await self._stream(path, request, context)

        handle: Any = stream  # A handler may write instead of yielding.
        return grpc.unary_stream_rpc_method_handler(handle)

    async def _unary(self, path: str, request: bytes, context: _Context) -> bytes:
        tried: list[Driver] = []
        while True:
            driver = self._pool.choose_any(tried)
            tried.append(driver)
            call = driver.channel.unary_unary(path)(request, **_passed_on(context))
            try:
                answer: bytes = await call
                context.set_trailing_metadata(_metadata(await call.trailing_metadata()))
                return answer
            except grpc.aio.AioRpcError as error:
                await self._lose_or_abort(driver, error, context, may_lose=True)
            finally:
                call.cancel()

    async def _stream(self, path: str, request: bytes, context: _Context) -> None:
        asked = inference_pb2.GenerateRequest()
        is_generate = path.endswith("/Generate")
        if is_generate:
            _read(asked, request)
        num_sequences = _num_samples(asked)
        tried: list[Driver] = []
        has_started = has_more = False
        while True:
            if is_generate:
                driver = self._pool.choose(None, input_of(asked), _tenant_of(asked), tried)
            else:
                driver = self._pool.choose_any(tried)
            tried.append(driver)
            call = driver.channel.unary_stream(path)(request, **_passed_on(context))
            driver.num_running += num_sequences
            try:
                async for answer in call:
                    if not has_more and is_generate and _is_started(answer):
                        if has_started:
                            continue
                        has_started = True
                    else:
                        has_more = True
                    await context.write(answer)
                context.set_trailing_metadata(_metadata(await call.trailing_metadata()))
                return
            except grpc.aio.AioRpcError as error:
                await self._lose_or_abort(driver, error, context, may_lose=not has_more)
            finally:
                driver.num_running -= num_sequences
                call.cancel()

    async def _lose_or_abort(
        self, driver: Driver, error: grpc.aio.AioRpcError, context: _Context, *, may_lose: bool
    ) -> None:
        """Return if another driver should be asked; else end the call with the driver's status."""
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            driver.lose(error_of(error, driver.address))
            if may_lose and self._pool.serves():
                return
        await _abort(context, error)

    async def _many(self, requests: AsyncIterator[bytes], context: _Context) -> None:
        try:
            await _Many(self._pool, context).serve(requests)
        except PacelineError as error:
            await context.abort(*status_of(error))


@dataclass(eq=False, slots=True)
class _Open:
    """A request of a GenerateMany stream. `begin`: its message; None: it is not kept.

    `num_open`: of its samples, those that have not finished.
    """

    number: int
    num_samples: int
    num_open: int
    begin: bytes | None
    has_started: bool = False
    link: _Link | None = None
    tried: list[Driver] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Link:
    """A GenerateMany stream to one driver, for one caller."""

    driver: Driver
    call: Any
    reading: asyncio.Task[None] | None = None


class _Many:
    """A caller's GenerateMany stream, divided among the drivers. Numbers stay as they are."""

    def __init__(self, pool: DriverPool, context: _Context) -> None:
        self._pool = pool
        self._context = context
        self._links: dict[Driver, _Link] = {}
        self._open: dict[int, _Open] = {}
        self._kept_bytes = 0
        self._writing = asyncio.Lock()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def serve(self, requests: AsyncIterator[bytes]) -> None:
        """Serve until the caller ends the stream. Raises the error that ends it."""
        reading = asyncio.create_task(self._read(requests))
        try:
            await asyncio.wait({reading, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            for ended in (reading, self._ended):
                if ended.done():
                    ended.result()
        except grpc.aio.AioRpcError as error:  # A driver's status that is about the caller.
            async with self._writing:
                await _abort(self._context, error)
        finally:
            tasks = [reading]
            for link in self._links.values():
                link.call.cancel()
                tasks += [link.reading] if link.reading is not None else []
            for task in tasks:
                task.cancel()
            self._ended.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for one in list(self._open.values()):
                self._forget(one)

    async def _read(self, requests: AsyncIterator[bytes]) -> None:
        async for raw in requests:
            message = inference_pb2.GenerateManyRequest()
            _read(message, raw)
            number = message.number
            match message.WhichOneof("message"):
                case "begin" if number in self._open:
                    raise InvalidRequestError(
                        "number",
                        f"request number {number} is already in use on this stream; choose another",
                    )
                case "begin":
                    kept = raw if self._kept_bytes + len(raw) <= MAX_KEPT_BYTES else None
                    self._kept_bytes += len(kept or b"")
                    num = _num_samples(message.begin)
                    one = self._open[number] = _Open(number, num, num, kept)
                    await self._begin(one, raw, message.begin)
                case "cancel":
                    open_one = self._open.get(number)
                    if open_one is not None:
                        link = open_one.link
                        self._forget(open_one)
                        if link is not None:
                            await self._write(link, raw)
                case _:
                    raise InvalidRequestError("message", "expected begin or cancel, got neither")

    async def _begin(self, one: _Open, raw: bytes, request: inference_pb2.GenerateRequest) -> None:
        """Send a request to a driver that it was not sent to yet; without one, it fails."""
        try:
            driver = self._pool.choose(None, input_of(request), _tenant_of(request), one.tried)
        except PacelineError as error:
            await self._fail(one, error)
            return
        one.tried.append(driver)
        one.link = self._links.get(driver) or self._open_link(driver)
        driver.num_running += one.num_samples
        await self._write(one.link, raw)

    def _open_link(self, driver: Driver) -> _Link:
        path = f"/{SERVICES[0].full_name}/GenerateMany"
        link = _Link(driver, driver.channel.stream_stream(path)(**_passed_on(self._context)))
        self._links[driver] = link
        link.reading = asyncio.create_task(self._answers(link))
        return link

    async def _write(self, link: _Link, raw: bytes) -> None:
        # The reading task gets the cause, and deals with the link's requests.
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            await link.call.write(raw)

    async def _answers(self, link: _Link) -> None:
        """Forward a driver's answers, and move or fail its requests when it is lost."""
        why: PacelineError = UnavailableError(f"the driver at {link.driver.address} ended")
        try:
            async for raw in link.call:
                await self._forward(link, raw)
        except grpc.aio.AioRpcError as error:
            if error.code() not in _LOST:
                self._end(error)
                return
            why = error_of(error, link.driver.address)
        except PacelineError as error:
            self._end(error)
            return
        del self._links[link.driver]
        link.driver.lose(why)
        for one in [one for one in self._open.values() if one.link is link]:
            await self._move(one, why)

    def _end(self, error: Exception) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)

    async def _forward(self, link: _Link, raw: bytes) -> None:
        message = inference_pb2.GenerateManyResponse()
        _read(message, raw)
        kept, moved = [], []
        for numbered in message.responses:
            one = self._open.get(numbered.number)
            if one is None or one.link is not link:
                continue  # It was cancelled.
            kind: str | None = numbered.WhichOneof("message")
            if kind == "response":
                kind = numbered.response.WhichOneof("message")
            if kind == "started":
                if one.has_started:
                    continue  # It was moved here.
                one.has_started = True
            elif kind == "failed" and self._is_loss(one, numbered.failed):
                moved.append(one)
                continue
            elif kind == "failed":
                self._forget(one)
            else:
                self._release(one)
                one.num_open -= kind == "finished"
                if not one.num_open:
                    self._forget(one)
            kept.append(numbered)
        if len(kept) != len(message.responses):
            raw = inference_pb2.GenerateManyResponse(responses=kept).SerializeToString()
        if kept:
            await self._write_to_caller(raw)
        for one in moved:
            await self._move(one, UnavailableError("it takes no requests now"))

    def _is_loss(self, one: _Open, failed: inference_pb2.RequestFailed) -> bool:
        """Whether another driver may still serve a request that failed."""
        unavailable = failed.code == grpc.StatusCode.UNAVAILABLE.value[0]
        return unavailable and one.begin is not None and self._pool.has_other(one.tried)

    async def _move(self, one: _Open, why: PacelineError) -> None:
        """Send a request without tokens to another driver. One with tokens fails.

        It may have ended meanwhile, and its number may be another request's.
        """
        if self._open.get(one.number) is not one:
            return
        if one.begin is None or not self._pool.has_other(one.tried):
            await self._fail(one, why)
            return
        if one.link is not None:
            one.link.driver.num_running -= one.num_samples
            one.link = None
        message = inference_pb2.GenerateManyRequest.FromString(one.begin)
        await self._begin(one, one.begin, message.begin)

    async def _fail(self, one: _Open, error: PacelineError) -> None:
        self._forget(one)
        failed = inference_pb2.NumberedResponse(number=one.number, failed=failure_to_wire(error))
        message = inference_pb2.GenerateManyResponse(responses=[failed])
        await self._write_to_caller(message.SerializeToString())

    async def _write_to_caller(self, raw: bytes) -> None:
        async with self._writing:
            await self._context.write(raw)

    def _release(self, one: _Open) -> None:
        """Keep its message no longer: it has tokens."""
        if one.begin is not None:
            self._kept_bytes -= len(one.begin)
            one.begin = None

    def _forget(self, one: _Open) -> None:
        self._release(one)
        if self._open.get(one.number) is one:
            del self._open[one.number]
        if one.link is not None:
            one.link.driver.num_running -= one.num_samples
            one.link = None


def _num_samples(request: inference_pb2.GenerateRequest) -> int:
    """The number of sequences of a request. The driver refuses more than MAX_SAMPLES."""
    return min(request.samples or 1, MAX_SAMPLES)


def _tenant_of(request: inference_pb2.GenerateRequest) -> str:
    """The tenant, for routing. Raises PermissionDeniedError if its key is of another one."""
    entry = CALLER.get()
    return request.tenant if entry is None else tenant_of(entry, request.tenant)


def input_of(request: inference_pb2.GenerateRequest) -> GenerateInput:
    """What a request begins with, for routing. The driver checks it."""
    match request.WhichOneof("input"):
        case "prompt":
            return request.prompt
        case "prompt_token_ids":
            return request.prompt_token_ids.token_ids
        case "messages":
            chat = request.messages
            first = islice(chat.messages, MAX_MESSAGES)
            messages = [Message(one.role, one.content) for one in first]
            return Chat(messages, tools=chat.tools)
        case _:
            return ""


def _is_started(answer: bytes) -> bool:
    message = inference_pb2.GenerateResponse()
    _read(message, answer)
    return message.WhichOneof("message") == "started"


def _read(message: Any, raw: bytes) -> None:
    """Raises InvalidRequestError."""
    try:
        message.ParseFromString(raw)
    except DecodeError:
        expected = f"expected a {message.DESCRIPTOR.name}, got bytes that are none"
        raise InvalidRequestError("message", expected) from None


async def _abort(context: _Context, error: grpc.aio.AioRpcError) -> None:
    """End a call with a driver's status."""
    await context.abort(error.code(), error.details() or "", _metadata(error.trailing_metadata()))


def _passed_on(context: _Context) -> dict[str, Any]:
    """The caller's deadline and metadata, for a call to a driver."""
    return {
        "timeout": context.time_remaining(),
        "metadata": _metadata(context.invocation_metadata()),
    }


def _metadata(pairs: Iterable[Any] | None) -> _Metadata:
    return tuple(
        (key, value)
        for key, value in pairs or ()
        if key == DETAILS_KEY or not key.startswith(_OWN_METADATA)
    )

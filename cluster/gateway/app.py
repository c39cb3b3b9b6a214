"""The ASGI application: OpenAI's paths, how it reads bodies, and what ends a request early."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from importlib.metadata import version
from typing import Any, TypeVar
from urllib.parse import quote

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from cluster.access.gate import Gate
from cluster.gateway.anthropic_messages import count_request, messages_request
from cluster.gateway.console import Watched, page_response
from cluster.gateway.content_blocks import BlockAnswer, BlockRequest
from cluster.gateway.counts import Exchange, SharedCounts
from cluster.gateway.drivers import DriverPool
from cluster.gateway.errors import (
    BodyTooLargeError,
    SlowBodyError,
    UnknownPathError,
    WrongMethodError,
    http_error,
)
from cluster.gateway.metrics import DriverMetrics, GatewayMetrics
from cluster.gateway.middleware import (
    LEFT,
    Guard,
    OneLength,
    Watching,
    path_of,
    place_of_caller,
    watch_of,
)
from cluster.gateway.openai_answers import Answer, Formats
from cluster.gateway.openai_responses import responses_request
from cluster.gateway.openapi import description
from cluster.gateway.requests import (
    Body,
    CompletionRequest,
    ReadBody,
    body_in,
    chat_request,
    completion_request,
)
from cluster.gateway.tokens import (
    DetokenizeRequest,
    TokenizeRequest,
    detokenize_request,
    tokenize_request,
)
from paceline.errors import OverloadedError, PacelineError, UnavailableError
from workers.process.tracing import Tracing

MAX_BODY_BYTES = 10 * 1024 * 1024
"""Most bytes of a body: the largest prompt and 2 MiB for the rest. While a body is parsed no other
request goes on, for a quarter of a second or a half if it is the worst JSON of this size."""

BODY_SECONDS = 30.0
"""Longest time from the headers to the end of the body."""

MAX_READ_BYTES = 4 * MAX_BODY_BYTES
"""Most bytes of a body that are read, with those beyond MAX_BODY_BYTES dropped. If the connection
ended while the caller still sends, the caller would see no error but a broken connection."""

MAX_OPEN_REQUESTS = 1024
"""Most requests of a gateway that were read and have not ended; the next is refused."""

SMALL_BODY_BYTES = 64 * 1024
"""Bodies up to this size are always read, so that large ones that stall do not shut them out. The
limit of connections bounds them."""

MAX_BODIES_BYTES = 256 * 1024 * 1024
"""Most bytes of all larger bodies that are being read."""

PIECE_BYTES = 64 * 1024
"""Most bytes of an answer that are written at once. The next piece waits until they are sent."""

SCRAPE_SECONDS = 1.0
"""Least time between two collections of metrics. A scrape in between gets the last one."""

IGNORED = "x-paceline-ignored"
"""The header of an answer that names the fields of the body which had no effect."""

MAX_IGNORED = 1000
"""Most characters of its value."""

_EVENT_STREAM = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""Headers of an event stream; the second keeps nginx from collecting events."""

T = TypeVar("T")
Asked = CompletionRequest | BlockRequest | TokenizeRequest | DetokenizeRequest

READERS: Mapping[str, Callable[[Body], Asked]] = {
    "/v1/chat/completions": chat_request,
    "/v1/completions": completion_request,
    "/v1/responses": responses_request,
    "/v1/messages": messages_request,
    "/v1/messages/count_tokens": count_request,
    "/tokenize": tokenize_request,
    "/detokenize": detokenize_request,
}
"""By path: what reads its bodies."""


class Gateway:
    """The application, and the number of its requests for text that have not ended.

    `gate`: who may call; None: everybody. `tracing`: makes a span for each HTTP request; None: no
    spans. `cors_origins`: pages of these origins may call, such as "https://chat.example.com"; "*":
    all pages. `exchange`: reaches what holds the counts of the gateways beside it; None: there are
    none.
    """

    def __init__(
        self,
        pool: DriverPool,
        gate: Gate | None = None,
        *,
        formats: Formats | None = None,
        tracing: Tracing | None = None,
        cors_origins: Sequence[str] = (),
        exchange: Exchange | None = None,
    ) -> None:
        self.num_open = 0
        """Requests for text that have not ended, including those whose bodies are being read."""
        self._pool = pool
        self._gate = gate
        self._formats = formats or Formats()
        self._tracing = tracing
        self._cors_origins = cors_origins
        self._is_draining = False
        self._has_none_open = asyncio.Event()
        self._has_none_open.set()
        self._num_reading = 0
        self._bodies_bytes = 0
        self._metrics = GatewayMetrics()
        self._counts = SharedCounts(self._metrics.registry, exchange)
        self._scraped = _Scraped(self._metrics, self._counts, pool)
        self._watched = Watched(pool, self._counts)
        self.app = self._build()

    @property
    def num_running(self) -> int:
        """Open sequences of its drivers, those of the gRPC server beside it included."""
        return self._pool.num_running

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, and give open ones this long to end."""
        self._is_draining = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._has_none_open.wait(), seconds)

    async def cut_off(self) -> None:
        self._is_draining = True
        await self._pool.close()

    def _build(self) -> FastAPI:
        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            async with self._pool, self._counts:
                yield

        app = FastAPI(
            lifespan=lifespan,
            redirect_slashes=False,
            docs_url=None,
            redoc_url=None,
            openapi_url=None,
        )
        if self._gate is not None:
            app.add_middleware(Guard, gate=self._gate)
        app.add_middleware(OneLength)
        app.add_middleware(
            Watching, metrics=self._metrics, routes=app.routes, tracing=self._tracing
        )
        endpoints: Mapping[str, Callable[..., Any]] = {
            "/": page_response(),
            "/docs": page_response("docs.html"),
            "/openapi.json": JSONResponse(description()),
            "/console/state": self._state,
            "/console/rounds": self._rounds,
            "/health": JSONResponse({}),
            "/ready": self._ready,
            "/version": self._version,
            "/metrics": self._tell_metrics,
            "/v1/models": self._models,
            "/v1/models/{name:path}": self._model,
        }
        for path, endpoint in endpoints.items():
            app.router.routes.append(Route(path, endpoint, methods=["GET"]))
        for path, read in READERS.items():
            app.router.routes.append(Route(path, _Answering(self, read), methods=["POST"]))
        for kind in (PacelineError, Exception):
            app.add_exception_handler(kind, _on_error)
        app.add_exception_handler(HTTPException, _on_http_exception)
        app.add_exception_handler(ClientDisconnect, _on_disconnect)
        if self._cors_origins:  # Around all, since answers to defects need its headers too.
            app.middleware_stack = CORSMiddleware(
                app.build_middleware_stack(),
                allow_origins=self._cors_origins,
                allow_methods=("GET", "POST"),
                allow_headers=("*",),
                expose_headers=(IGNORED, "retry-after"),
            )
        return app

    async def _state(self, request: Request) -> Response:
        return JSONResponse(await self._watched.state())

    async def _rounds(self, request: Request) -> Response:
        events = self._watched.rounds(request.query_params.get("driver"))
        return _EventStream(await anext(events), events)

    async def _ready(self, request: Request) -> Response:
        if self._is_draining:
            raise UnavailableError("this server is ending")
        try:
            models = self._pool.models()
        except UnavailableError as error:
            return http_error(error).response(workers=self._pool.workers)
        return JSONResponse({"models": models, "troubles": self._pool.troubles()})

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": version("paceline")})

    async def _tell_metrics(self, request: Request) -> Response:
        return Response(await self._scraped.text(), media_type=CONTENT_TYPE_LATEST)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": list(map(self._told, self._pool.models()))})

    async def _model(self, request: Request) -> Response:
        return JSONResponse(self._told(request.path_params["name"]))

    def _told(self, name: str) -> dict[str, Any]:
        """A model as `/v1/models` lists it. The field `max_model_len` is vLLM's."""
        described = self._pool.describe(name)
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "paceline",
            "max_model_len": described.max_model_len,
        }

    async def answer(
        self, read: Callable[[Body], Asked], scope: Scope, receive: Receive, send: Send
    ) -> None:
        if self._is_draining:
            raise UnavailableError("this server is ending; ask another one")
        self.num_open += 1
        self._has_none_open.clear()
        try:
            with place_of_caller() as ticket:
                request = Request(scope, receive)
                body = await self._body(request)
                if self.num_open - self._num_reading > MAX_OPEN_REQUESTS:
                    raise OverloadedError(
                        f"there are {MAX_OPEN_REQUESTS} requests already; try again"
                    )
                fields = ReadBody(body_in("body", body))
                asked = read(fields)
                if ticket is not None and isinstance(asked, CompletionRequest):
                    ticket.add(asked.num_choices - 1)
                response = await self._answer(request, asked)
                if ignored := fields.ignored():
                    response.headers[IGNORED] = _names_of(ignored)
                await response(scope, receive, send)
        finally:
            self.num_open -= 1
            if not self.num_open:
                self._has_none_open.set()

    async def _answer(self, request: Request, asked: Asked) -> Response:
        model = asked.model
        if model is None:
            model = self._pool.models()[0]
        if not isinstance(asked, CompletionRequest | BlockRequest):
            whole = await unless_gone(request.receive, asked.answer(self._pool, model))
            return _InPieces(whole, media_type="application/json")
        in_blocks = asked if isinstance(asked, BlockRequest) else None
        plain = Answer(
            self._pool,
            asked.chat if isinstance(asked, BlockRequest) else asked,
            model=model,
            described=self._pool.describe(model),
            formats=self._formats,
            watch=watch_of(request.scope),
            id_prefix=None if in_blocks is None else in_blocks.id_prefix,
        )
        answer: Answer | BlockAnswer = plain
        if in_blocks is not None:
            answer = BlockAnswer(plain, in_blocks, model)
        if not asked.stream:
            whole = await unless_gone(request.receive, answer.whole())
            return _InPieces(whole, media_type="application/json")
        events = answer.stream()
        try:
            first = await unless_gone(request.receive, anext(events))
        except BaseException:
            await events.aclose()
            raise
        return _EventStream(first, events, answer.failed)

    async def _body(self, request: Request) -> bytearray:
        """The bytes of the body. No more of it is kept than a body may have."""
        body, size, counted = bytearray(), 0, 0
        self._num_reading += 1
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    size += len(part)
                    if size > MAX_READ_BYTES:
                        break
                    if size <= MAX_BODY_BYTES:
                        body += part
                    if len(body) > SMALL_BODY_BYTES:
                        self._bodies_bytes += len(body) - counted
                        counted = len(body)
                        if self._bodies_bytes > MAX_BODIES_BYTES:
                            raise OverloadedError("too many large bodies arrive at once; try again")
        except TimeoutError:
            raise SlowBodyError(
                f"the body did not arrive within {BODY_SECONDS:g} s; {size:,} bytes did"
            ) from None
        finally:
            self._num_reading -= 1
            self._bodies_bytes -= counted
        if size > MAX_BODY_BYTES:
            raise BodyTooLargeError(f"expected a body of at most {MAX_BODY_BYTES:,} bytes")
        return body


def _names_of(fields: list[str]) -> str:
    """Names of fields as the value of a header: what is not of ASCII is written in %XX."""
    told = ", ".join(quote(name[:MAX_IGNORED], safe="[]") for name in fields[:MAX_IGNORED])
    return told if len(told) <= MAX_IGNORED else f"{told[: MAX_IGNORED - 3]}..."


class _Scraped:
    """The text of all metrics. Drivers are asked at most every SCRAPE_SECONDS.

    The text is made at most as often, but for a gateway among others: an older text than that of
    another would have counters go back.
    """

    def __init__(self, metrics: GatewayMetrics, counts: SharedCounts, pool: DriverPool) -> None:
        self._metrics = metrics
        self._pool = pool
        self._counts = counts
        self._of_drivers = DriverMetrics()
        self._all = CollectorRegistry()
        for collector in (counts, self._of_drivers):
            self._all.register(collector)
        self._text = b""
        self._made_at: float | None = None
        self._making = asyncio.Lock()

    async def text(self) -> bytes:
        async with self._making:
            now = time.monotonic()
            is_old = self._made_at is None or now - self._made_at >= SCRAPE_SECONDS
            if is_old:
                reports = await self._pool.reports()
                self._of_drivers.take(reports)
                for report in reports:
                    if report.model is not None:  # Counters are there before they count.
                        self._metrics.of_model(report.model)
                self._made_at = time.monotonic()
            if is_old or self._counts.is_shared:
                await self._counts.refresh()
                self._text = generate_latest(self._all)
            return self._text


class _Answering:
    def __init__(self, gateway: Gateway, read: Callable[[Body], Asked]) -> None:
        self._gateway = gateway
        self._read = read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._gateway.answer(self._read, scope, receive, send)


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled as soon as the caller closes the connection.

    Raises ClientDisconnect then. The body must have been read.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_until_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _InPieces(Response):
    """Sends a whole answer as its caller reads it, so that it counts as open until it is sent."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        for start in range(0, len(self.body), PIECE_BYTES):
            piece = self.body[start : start + PIECE_BYTES]
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _EventStream(Response):
    """Sends server-sent events as they come. Whatever ends it, it closes `events`.

    `failed`: the events that tell an error of theirs; None: it is raised.
    """

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes],
        failed: Callable[[Exception], bytes] | None = None,
    ) -> None:
        super().__init__(headers=_EVENT_STREAM, media_type="text/event-stream")
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            with suppress(ClientDisconnect):
                await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        event: bytes | None = self._first
        while event is not None:
            await send({"type": "http.response.body", "body": event, "more_body": True})
            try:
                event = await anext(self._events, None)
            except Exception as error:
                if self._failed is None:
                    raise
                event = self._failed(error)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _on_error(request: Request, error: Exception) -> Response:
    return http_error(error).response(path_of(request.scope))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    if error.status_code == 405:
        wrong = WrongMethodError(f"{path} does not take {method}")
        response = http_error(wrong).response(path_of(request.scope))
        response.headers.update(error.headers or {})  # Allow
        return response
    unknown = UnknownPathError(f"there is nothing at {path}")
    return http_error(unknown).response(path_of(request.scope))


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=LEFT)  # The caller has gone, so no one reads it.

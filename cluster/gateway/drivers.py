"""The drivers behind a gateway: which of them serve, and which one gets the next request.

A driver that has served a prompt with the same beginning has its KV (target.prefix_cache), so its
prefill is shorter. Tokens are not known here, so beginnings are compared by blocks of what the
caller sent: text, messages or token ids. A request goes to the driver that got the longest shared
beginning last, while that one runs at most SLACK + SHARE times the requests of the least busy one.
Else, and without a shared beginning, it goes to the least busy one; of equally busy ones, to the
one that was chosen least recently. Loads are the requests that this gateway has given to each
driver.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from itertools import islice
from typing import Any, Self, TypeVar, cast

from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.gateway.errors import UnknownModelError
from cluster.gateway.metrics import DriverReport
from cluster.gateway.middleware import CALLER
from paceline import AsyncClient
from paceline.access import Access, Credentials
from paceline.chat import Message, json_text, message_of
from paceline.errors import DeadlineError, OverloadedError, UnavailableError
from paceline.generation import (
    CallerInput,
    GenerateEvent,
    GenerateInput,
    ModelDescription,
    Stats,
    Topology,
    chat_of,
)
from paceline.options import GenerateOptions
from paceline.quiet_grpc import grpc
from paceline.retries import Answering, Retries
from paceline.status import error_of
from paceline.v1 import trace_pb2, trace_pb2_grpc
from workers.process.mutual_tls import WorkerTls

T = TypeVar("T")

_log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""Time between two looks at a driver: how long one that came back may stay unused."""


ANSWER_SECONDS = 5.0
"""How long a driver may take to answer a look. It is used no more if it takes longer twice in a
row: once it may only be busy."""


RETRIES = Retries(attempts=3, first_seconds=0.05, most_seconds=1.0)
"""How often a request may lose its driver in a row without a token between, in case it is the cause
of the loss."""

AWAY_SECONDS = 30.0
"""How long an answer that lost its driver waits until one serves. A driver is back in some 10 s."""

_POLL_SECONDS = 0.1

MAX_CLIENTS = 256
"""Clients of a driver for callers with keys, a stream each. Beyond that, idle ones are closed."""

ASK_SECONDS = 2.0
"""How long a driver may take to tell its counters."""

BLOCK_BYTES = 256
"""Bytes of a block, about 60 tokens of English text. A shorter prompt has no beginning to share."""

MAX_BLOCKS = 256
"""Most blocks of a prompt that are compared: its first 64 KiB. Beyond that they rarely differ."""

MAX_TENANTS = 256
"""Most tenants whose beginnings are remembered; the one that asked least recently is forgotten."""

MAX_BEGINNINGS = 8192
"""Most blocks that are remembered for a tenant, about 1 MB. The oldest is forgotten first."""

SLACK, SHARE = 4, 1.5
"""A driver that has a beginning gets the request while it runs at most SLACK + SHARE times as many
requests as the least busy one. SGLang's router uses the same form. To prefill again costs less than
to wait behind that many requests."""

_TOKEN_BYTES, _LARGEST = 4, 0xFFFFFFFF


class Driver:
    """One driver. `description` is None while it serves nothing; then `trouble` says why.

    `model` is the name of what it served last, None if it never served.
    """

    def __init__(self, address: str, access: Access, tls: WorkerTls | None = None) -> None:
        self.address = address
        self._access = access
        self._tls = tls
        self.client = self._client(access)
        # Those of callers by their keys, the most recently used last.
        self._clients: OrderedDict[str, AsyncClient] = OrderedDict()
        self._num_using: Counter[str] = Counter()
        self.description: ModelDescription | None = None
        self.model: str | None = None
        self.trouble = "it has not answered yet"
        self.num_running = 0
        # gRPC makes one connection for channels with equal options, with a limit of open calls. The
        # gRPC front has a connection of its own, so that its callers leave room for health checks.
        credentials = Credentials.of(**access, connector=tls)
        self._channel: Any = credentials.async_channel(address)
        self.channel: Any = credentials.async_channel(address, own_connection=True)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._tracer: Any = credentials.stub(trace_pb2_grpc.TraceServiceStub, self._channel)
        self._is_slow = False

    async def look(self) -> None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                description = await self.client.describe()
                await self._check_health()
        except (TimeoutError, DeadlineError):
            if self._is_slow:
                self.lose(UnavailableError(f"it did not answer within {ANSWER_SECONDS:g} s, twice"))
            else:
                _log.warning("the driver at %s is slow to answer", self.address)
            self._is_slow = True
        except Exception as error:  # The next look may succeed, whatever the error is.
            self.lose(error)
        else:
            self._is_slow = False
            if self.description is None:
                # The log that has the loss has the return.
                level = logging.INFO if self.model is None else logging.WARNING
                _log.log(level, "the driver at %s serves %s", self.address, description.model)
            self.description = description
            self.model = description.model

    async def _check_health(self) -> None:
        """Raise UnavailableError while it drains, or has lost its target."""
        try:
            told = await self._health.Check(health_pb2.HealthCheckRequest())
        except grpc.RpcError as error:
            raise error_of(error, self.address) from error
        if told.status != health_pb2.HealthCheckResponse.SERVING:
            raise UnavailableError("it takes no requests now: it drains, or has lost its target")

    async def stats(self) -> Stats | None:
        """Its counters; None: it does not tell them in time."""
        return await self._told(self.client.stats())

    async def topology(self) -> Topology | None:
        """Its layout; None: it does not tell it in time."""
        return await self._told(self.client.describe_topology())

    async def _told(self, answer: Awaitable[T]) -> T | None:
        try:
            async with asyncio.timeout(ASK_SECONDS):
                return await answer
        except Exception as error:  # The scrape goes on without it.
            _log.debug("the driver at %s does not tell what it does: %s", self.address, error)
            return None

    async def trace(self) -> AsyncGenerator[trace_pb2.TraceResponse]:
        """The messages of its TraceService. Raises the driver's PacelineError."""
        call = self._tracer.Trace(trace_pb2.TraceRequest())
        try:
            async for message in call:
                yield message
        except grpc.RpcError as error:
            raise error_of(error, self.address) from error
        finally:
            call.cancel()

    def lose(self, error: Exception) -> None:
        """Use it no more until it answers again."""
        if self.description is not None:
            _log.warning("the driver at %s is not used: %s", self.address, error)
        self.description = None
        self.trouble = str(error)

    def _client(self, access: Access) -> AsyncClient:
        once = Retries(0)  # The pool tries again, at any driver.
        return AsyncClient(
            self.address,
            connect_timeout=LOOK_SECONDS,
            retries=once,
            connector=self._tls,
            **access,
        )

    async def stream(
        self, generate_input: CallerInput, options: GenerateOptions
    ) -> AsyncGenerator[GenerateEvent]:
        async with (
            self.client_of_caller() as client,
            aclosing(client.stream(generate_input, options)) as events,
        ):
            async for event in events:
                yield event

    @asynccontextmanager
    async def client_of_caller(self) -> AsyncIterator[AsyncClient]:
        """A client with the key of the present caller, while the block runs."""
        caller = CALLER.get()
        key = None if caller is None else caller.key
        if key is None:
            client = self.client
        else:
            if key not in self._clients:
                self._clients[key] = self._client({**self._access, "key": key})
            self._clients.move_to_end(key)
            client = self._clients[key]
            self._num_using[key] += 1
        try:
            yield client
        finally:
            if key is not None:
                self._num_using[key] -= 1
                await self._close_idle()

    async def _close_idle(self) -> None:
        """Close clients that nobody uses, the least recently used first, if there are too many."""
        idle = [key for key in self._clients if not self._num_using[key]]
        for key in idle[: max(0, len(self._clients) - MAX_CLIENTS)]:
            del self._num_using[key]
            await self._clients.pop(key).close()

    async def close(self) -> None:
        """End its requests. Closing twice is no error."""
        await self.client.close()
        for client in tuple(self._clients.values()):
            await client.close()
        await self.channel.close(None)
        await self._channel.close(None)


class DriverPool:
    """Several drivers as one. Use it with `async with`, inside the event loop that serves.

    `served_model_name`: the name of the model to callers; None: as the drivers name it. `access`:
    the gateway's own key, and TLS, for all of them. `tls`: in place of that TLS, for drivers of the
    gateway's own deployment.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        served_model_name: str | None = None,
        access: Access | None = None,
        tls: WorkerTls | None = None,
    ) -> None:
        self._tls = tls
        self.workers: Mapping[str, str] = {}
        """What each worker of a deployment that starts does now; empty if it is not known."""
        self._addresses = addresses
        self._served_model_name = served_model_name
        self._access: Access = access or {}
        self.drivers: list[Driver] = []
        """All drivers, whether or not they serve."""
        self._looks: dict[Driver, asyncio.Task[None]] = {}
        self._router = Router()
        self.is_closed = False
        """Whether its requests were ended."""

    async def __aenter__(self) -> Self:
        """Returns when each driver has been looked at once, whether or not it answered."""
        await self.set_addresses(self._addresses)
        return self

    async def set_addresses(self, addresses: Sequence[str]) -> None:
        """Use these drivers from now on. Requests of a driver that is left out end.

        Returns when each new one has been looked at once.
        """
        left_out = [driver for driver in self.drivers if driver.address not in addresses]
        known = {driver.address for driver in self.drivers}
        new = [
            Driver(address, self._access, self._tls)
            for address in addresses
            if address not in known
        ]
        self.drivers = [one for one in self.drivers if one not in left_out] + new
        await asyncio.gather(*(driver.look() for driver in new), *map(self._leave_out, left_out))
        if not self.is_closed:
            self._looks |= {driver: asyncio.create_task(_look_again(driver)) for driver in new}

    async def _leave_out(self, driver: Driver) -> None:
        look = self._looks.pop(driver, None)
        if look is not None:
            look.cancel()
            await asyncio.gather(look, return_exceptions=True)
        await driver.close()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all requests with UnavailableError. Closing twice is no error."""
        self.is_closed = True
        looks = list(self._looks.values())
        for look in looks:
            look.cancel()
        await asyncio.gather(*looks, return_exceptions=True)
        await asyncio.gather(*(driver.close() for driver in self.drivers))

    def models(self) -> list[str]:
        """Names of what is served now. Raises UnavailableError if no driver serves."""
        names = [self.name(one) for one in self.drivers if one.description is not None]
        if not names:
            raise UnavailableError(f"no driver serves yet: {self._why_none()}")
        return [name for name in dict.fromkeys(names) if name is not None]

    def describe(self, name: str) -> ModelDescription:
        """What is served under a name. Raises UnavailableError, UnknownModelError."""
        known = [driver for driver in self.drivers if self.name(driver) == name]
        for driver in known:
            if driver.description is not None:
                return driver.description
        if known:
            lost = "; ".join(f"{driver.address}: {driver.trouble}" for driver in known)
            raise UnavailableError(f"no driver serves {name} now: {lost}")
        raise UnknownModelError(
            "model", f"expected one of {', '.join(self.models())}; got {name!r:.200}"
        )

    @property
    def num_running(self) -> int:
        """Open sequences of all drivers, whether they came by HTTP or gRPC."""
        return sum(driver.num_running for driver in self.drivers)

    def serves(self) -> bool:
        return any(driver.description is not None for driver in self.drivers)

    def has_other(self, tried: Sequence[Driver]) -> bool:
        return any(one.description is not None and one not in tried for one in self.drivers)

    def troubles(self) -> list[str]:
        """For each driver that does not serve: the reason."""
        return [
            f"{driver.address}: {driver.trouble}"
            for driver in self.drivers
            if driver.description is None
        ]

    async def reports(self) -> list[DriverReport]:
        """What each driver counts. Takes at most ASK_SECONDS."""
        told = await asyncio.gather(*(driver.stats() for driver in self.drivers))
        return [
            DriverReport(driver.address, self.name(driver), stats)
            for driver, stats in zip(self.drivers, told, strict=True)
        ]

    def _why_none(self) -> str:
        loading = [f"{name} {state}" for name, state in self.workers.items()]
        return "; ".join([*loading, *self.troubles()])

    async def stream(
        self, model: str, generate_input: GenerateInput, options: GenerateOptions
    ) -> AsyncGenerator[GenerateEvent]:
        """Decode a request on a driver of that model (`Router` chooses it).

        A request whose driver is lost goes on at another, or at the same one when it is back, after
        the last token that the caller has. Closing the iterator cancels the request. The key of a
        caller decides the tenant.
        """
        caller = CALLER.get()
        if caller is not None:
            options = replace(options, tenant=caller.entry.tenant)
        answering = Answering(generate_input, options, RETRIES)
        tenant, num_sequences = options.tenant or "", options.samples or 1
        choose = partial(self.choose, model, generate_input, tenant, tried=())
        driver = choose()
        while True:
            driver.num_running += num_sequences
            try:
                async with aclosing(driver.stream(answering.input, answering.options)) as events:
                    async for event in events:
                        if answering.take(event):
                            yield event
                return
            except (UnavailableError, OverloadedError) as error:
                if isinstance(error, UnavailableError):
                    if not self.is_closed:
                        driver.lose(error)
                elif not answering.has_tokens:
                    raise  # The caller can ask again. One with tokens waits for room.
                lost = error
            finally:
                driver.num_running -= num_sequences
            driver = await self._after(lost, answering, choose)

    async def _after(
        self,
        lost: UnavailableError | OverloadedError,
        answering: Answering,
        choose: Callable[[], Driver],
    ) -> Driver:
        """The driver that takes over. Raises `lost` if there is none in time.

        A caller that has no token yet is told at once that none serves, since it can ask again.
        """
        give_up_at = time.monotonic() + (AWAY_SECONDS if answering.has_tokens else 0.0)
        pause = answering.pause_after(lost)
        while not self.is_closed:
            await asyncio.sleep(pause)
            try:
                return choose()
            except UnavailableError:
                if time.monotonic() > give_up_at:
                    raise lost from None
            pause = _POLL_SECONDS
        raise UnavailableError("this server has ended; ask another one") from None

    async def ask(self, model: str, question: Callable[[AsyncClient], Awaitable[T]]) -> T:
        """The answer of a driver of that model to a question that any of them can answer.

        A driver that is lost meanwhile is replaced by another.
        """
        tried: list[Driver] = []
        while True:
            driver = min(self._fitting(model, tried), key=lambda driver: driver.num_running)
            tried.append(driver)
            try:
                async with driver.client_of_caller() as client:
                    return await question(client)
            except UnavailableError as error:
                if self.is_closed:
                    raise UnavailableError("this server has ended; ask another one") from None
                driver.lose(error)

    def choose(
        self, model: str | None, given: GenerateInput, tenant: str, tried: Sequence[Driver]
    ) -> Driver:
        """A driver for a request that none of `tried` could serve.

        `model`: its name to callers; None: the first that is served. Raises UnavailableError and
        UnknownModelError.
        """
        fitting = {driver.address: driver for driver in self._fitting(model, tried)}
        loads = {address: driver.num_running for address, driver in fitting.items()}
        return fitting[self._router.choose(loads, given, tenant)]

    def choose_any(self, tried: Sequence[Driver]) -> Driver:
        """A driver for a call that is no request for text. Raises UnavailableError."""
        return min(self._fitting(None, tried), key=lambda driver: driver.num_running)

    def _fitting(self, model: str | None, tried: Sequence[Driver]) -> list[Driver]:
        if self.is_closed:
            raise UnavailableError("this server has ended; ask another one")
        if model is None:
            model = self.models()[0]
        self.describe(model)
        fitting = [
            driver
            for driver in self.drivers
            if driver.description is not None and self.name(driver) == model and driver not in tried
        ]
        if not fitting:
            raise UnavailableError(f"the driver was lost: {tried[-1].trouble}")
        return fitting

    def name(self, driver: Driver) -> str | None:
        """What a driver serves, or served last; None if it never served."""
        return self._served_model_name or driver.model


async def _look_again(driver: Driver) -> None:
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        await driver.look()


class Router:
    """Remembers who served which beginnings, within bounds."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, OrderedDict[bytes, str]] = OrderedDict()
        self._chosen: OrderedDict[str, None] = OrderedDict()
        """Drivers in the order in which they were chosen last."""

    def choose(self, loads: Mapping[str, int], given: GenerateInput, tenant: str) -> str:
        """The driver for a request, which counts as served by it.

        `loads`: open sequences of each driver, by its address; at least one.
        """
        if len(loads) == 1:
            return next(iter(loads))
        blocks = list(_beginnings(given))
        served_by = self._served_by(tenant)
        holders = (served_by.get(block, "") for block in reversed(blocks))
        chosen = next((one for one in holders if one in loads), None)
        if chosen is None or loads[chosen] > SLACK + SHARE * min(loads.values()):
            order = {address: number for number, address in enumerate(self._chosen)}
            chosen = min(loads, key=lambda one: (loads[one], order.get(one, -1)))
        self._chosen[chosen] = None
        self._chosen.move_to_end(chosen)
        while len(self._chosen) > MAX_TENANTS:
            self._chosen.popitem(last=False)
        for block in blocks:
            served_by[block] = chosen
            served_by.move_to_end(block)
        while len(served_by) > MAX_BEGINNINGS:
            served_by.popitem(last=False)
        return chosen

    def _served_by(self, tenant: str) -> OrderedDict[bytes, str]:
        """By block, the address of the driver that was given it last."""
        found = self._tenants.setdefault(tenant, OrderedDict())
        self._tenants.move_to_end(tenant)
        while len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)
        return found


def _beginnings(given: GenerateInput) -> Iterator[bytes]:
    """A hash for each whole block, of everything up to its end."""
    digest = blake2b(digest_size=8)
    whole = _first_bytes(given, MAX_BLOCKS * BLOCK_BYTES)
    for end in range(BLOCK_BYTES, len(whole) + 1, BLOCK_BYTES):
        digest.update(whole[end - BLOCK_BYTES : end])
        yield digest.digest()


def _first_bytes(given: GenerateInput, count: int) -> bytes:
    """The first bytes of what the caller sent. Kinds of inputs never begin alike."""
    if isinstance(given, str):
        return b"t" + given[:count].encode(errors="replace")[: count - 1]
    found = bytearray()
    chat = chat_of(given)
    if chat is not None:
        found += b"m" + json_text("tools", chat.tools)[:count].encode(errors="replace")
        for message in chat.messages:
            if not isinstance(message, Message):
                message = message_of(message)
            found += f"{message.role}\0{message.content[:count]}\0".encode(errors="replace")
            if len(found) >= count:
                break
    else:
        found += b"i"
        for token_id in islice(cast("Iterable[int]", given), count // _TOKEN_BYTES):
            assert isinstance(token_id, int)
            found += (token_id & _LARGEST).to_bytes(_TOKEN_BYTES, "little")
    return bytes(found[:count])

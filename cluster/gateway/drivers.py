"""The drivers behind a gateway: which of them serve, and which one gets the next request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self, cast

from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.gateway.errors import UnknownModelError
from paceline import AsyncClient
from paceline.channel import caller_options
from paceline.errors import DeadlineError, UnavailableError
from paceline.generation import GenerateEvent, GenerateInput, ModelDescription, Started
from paceline.options import GenerateOptions
from paceline.quiet_grpc import grpc
from paceline.status import error_of

_log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""Time between two looks at a driver: how long one that came back may stay unused."""


ANSWER_SECONDS = 5.0
"""How long a driver may take to answer a look. It is used no more if it takes longer twice in a
row: once it may only be busy."""


class _Driver:
    """One driver. `description` is None while it serves nothing; then `trouble` says why.

    `model` is the name of what it served last, None if it never served.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.client = AsyncClient(address, connect_timeout=LOOK_SECONDS)
        self.description: ModelDescription | None = None
        self.model: str | None = None
        self.trouble = "it has not answered yet"
        self.num_running = 0
        # gRPC makes one connection for channels with equal options.
        self._channel = grpc.aio.insecure_channel(address, options=caller_options(address))
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._is_slow = False

    async def look(self) -> None:
        """Ask what it serves, and whether it takes requests."""
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

    def lose(self, error: Exception) -> None:
        """Use it no more until it answers again."""
        if self.description is not None:
            _log.warning("the driver at %s is not used: %s", self.address, error)
        self.description = None
        self.trouble = str(error)

    async def close(self) -> None:
        """End its requests. Closing twice is no error."""
        await self.client.close()
        await self._channel.close(None)


class DriverPool:
    """Several drivers as one. Use it with `async with`, inside the event loop that serves.

    `served_model_name`: the name of the model to callers; None: as the drivers name it.
    """

    def __init__(self, addresses: Sequence[str], *, served_model_name: str | None = None) -> None:
        self._addresses = addresses
        self._served_model_name = served_model_name
        self._drivers: list[_Driver] = []
        self._looks: list[asyncio.Task[None]] = []
        self._is_closed = False

    async def __aenter__(self) -> Self:
        """Returns when each driver has been looked at once, whether or not it answered."""
        self._drivers = [_Driver(address) for address in self._addresses]
        await asyncio.gather(*(driver.look() for driver in self._drivers))
        self._looks = [asyncio.create_task(_look_again(driver)) for driver in self._drivers]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all requests with UnavailableError. Closing twice is no error."""
        self._is_closed = True
        for look in self._looks:
            look.cancel()
        await asyncio.gather(*self._looks, return_exceptions=True)
        await asyncio.gather(*(driver.close() for driver in self._drivers))

    def models(self) -> list[str]:
        """Names of what is served now. Raises UnavailableError if no driver serves."""
        names = [self._name(one) for one in self._drivers if one.description is not None]
        if not names:
            raise UnavailableError(f"no driver serves yet: {'; '.join(self.troubles())}")
        return [name for name in dict.fromkeys(names) if name is not None]

    def describe(self, name: str) -> ModelDescription:
        """What is served under a name. Raises UnavailableError, UnknownModelError."""
        known = [driver for driver in self._drivers if self._name(driver) == name]
        for driver in known:
            if driver.description is not None:
                return driver.description
        if known:
            lost = "; ".join(f"{driver.address}: {driver.trouble}" for driver in known)
            raise UnavailableError(f"no driver serves {name} now: {lost}")
        raise UnknownModelError(
            "model", f"expected one of {', '.join(self.models())}; got {name!r:.200}"
        )

    def troubles(self) -> list[str]:
        """For each driver that does not serve: the reason."""
        return [
            f"{driver.address}: {driver.trouble}"
            for driver in self._drivers
            if driver.description is None
        ]

    async def stream(
        self, model: str, generate_input: GenerateInput, options: GenerateOptions
    ) -> AsyncGenerator[GenerateEvent]:
        """Decode a request on the driver of that model that runs the fewest requests.

        A driver that is lost before its first token is replaced by another. Closing the iterator
        cancels the request.
        """
        tried: list[_Driver] = []
        has_started = has_tokens = False
        while True:
            driver = self._least_busy(model, tried)
            tried.append(driver)
            driver.num_running += 1
            try:
                async with aclosing(_events(driver, generate_input, options)) as events:
                    async for event in events:
                        if not isinstance(event, Started):
                            has_tokens = True
                        elif has_started:
                            continue
                        has_started = True
                        yield event
                return
            except UnavailableError as error:
                if self._is_closed:
                    raise UnavailableError("this server has ended; ask another one") from None
                driver.lose(error)
                if has_tokens:
                    raise
            finally:
                driver.num_running -= 1

    def _least_busy(self, model: str, tried: Sequence[_Driver]) -> _Driver:
        self.describe(model)
        fitting = [
            driver
            for driver in self._drivers
            if driver.description is not None
            and self._name(driver) == model
            and driver not in tried
        ]
        if not fitting:
            raise UnavailableError(f"the driver was lost: {tried[-1].trouble}")
        return min(fitting, key=lambda driver: driver.num_running)

    def _name(self, driver: _Driver) -> str | None:
        """What a driver serves, or served last; None if it never served."""
        return self._served_model_name or driver.model


def _events(
    driver: _Driver, generate_input: GenerateInput, options: GenerateOptions
) -> AsyncGenerator[GenerateEvent]:
    events = driver.client.stream(generate_input, options)
    return cast(
        "AsyncGenerator[GenerateEvent]", events
    )  # It has `aclose`; its type does not say so.


async def _look_again(driver: _Driver) -> None:
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        await driver.look()

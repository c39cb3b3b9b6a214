"""The drivers behind a gateway: which of them serve, and which one gets the next request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self, cast

from cluster.gateway.errors import UnknownModelError
from paceline import AsyncClient
from paceline.errors import DeadlineError, UnavailableError
from paceline.generation import GenerateEvent, GenerateInput, ModelDescription, Started
from paceline.options import GenerateOptions

_log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""Time between two looks at a driver: how long one that came back may stay unused."""


class _Driver:
    """One driver. `description` is None while it serves nothing; then `trouble` says why."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.client = AsyncClient(address, connect_timeout=LOOK_SECONDS)
        self.description: ModelDescription | None = None
        self.trouble = "it has not answered yet"
        self.num_running = 0

    async def look(self) -> None:
        """Ask what it serves."""
        try:
            description = await self.client.describe()
        except DeadlineError as error:  # It may only be busy.
            _log.warning("the driver at %s is slow to answer: %s", self.address, error)
        except Exception as error:  # The next look may succeed, whatever the error is.
            self.lose(error)
        else:
            if self.description is None:
                _log.info("the driver at %s serves %s", self.address, description.model)
            self.description = description

    def lose(self, error: Exception) -> None:
        """Use it no more until it answers again."""
        if self.description is not None:
            _log.warning("the driver at %s is not used: %s", self.address, error)
        self.description = None
        self.trouble = str(error)


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
        await asyncio.gather(*(driver.client.close() for driver in self._drivers))

    def models(self) -> list[str]:
        """Names of what is served now. Raises UnavailableError if no driver serves."""
        serving = [one.description for one in self._drivers if one.description is not None]
        if not serving:
            raise UnavailableError(f"no driver serves yet: {'; '.join(self.troubles())}")
        return list(dict.fromkeys(map(self._name, serving)))

    def describe(self, name: str) -> ModelDescription:
        """What is served under a name. Raises UnavailableError, UnknownModelError."""
        for driver in self._drivers:
            if driver.description is not None and self._name(driver.description) == name:
                return driver.description
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
            and self._name(driver.description) == model
            and driver not in tried
        ]
        if not fitting:
            raise UnavailableError(f"the driver was lost: {tried[-1].trouble}")
        return min(fitting, key=lambda driver: driver.num_running)

    def _name(self, description: ModelDescription) -> str:
        return self._served_model_name or description.model


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

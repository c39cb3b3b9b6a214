"""Begins requests for callers with API keys: as which tenant, and how many at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from cluster.access.gate import CALLER, Gate, tenant_of
from cluster.access.keys import KeyEntry
from cluster.driver.driver import Driver
from cluster.driver.generation import Generation
from paceline.errors import UnauthenticatedError
from paceline.generation import GenerateInput
from paceline.options import GenerateOptions


class Admission:
    """A driver as a caller sees it. `gate`: None: everybody may call it, as any tenant."""

    def __init__(self, driver: Driver, gate: Gate | None = None) -> None:
        self._driver = driver
        self._gate = gate

    async def submit(self, generate_input: GenerateInput, options: GenerateOptions) -> Generation:
        """Begin a request of the present call.

        Raises what `Driver.submit` raises, and UnauthenticatedError, PermissionDeniedError or
        RateLimitedError. A stream may outlive its key, so each request of it is checked.
        """
        entry = self._entry()
        if self._gate is None or entry is None:
            return await self._driver.submit(generate_input, options)
        options = replace(options, tenant=tenant_of(entry, options.tenant))
        with ExitStack() as held:
            held.enter_context(self._gate.quotas.place(entry, options.samples or 1))
            generation = await self._driver.submit(generate_input, options, priority=entry.priority)
            generation.call_when_over(held.pop_all().close)
        return generation

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place of the present call's caller while the block runs: it counts as a request.

        Raises UnauthenticatedError or RateLimitedError.
        """
        entry = self._entry()
        if self._gate is None or entry is None:
            yield
            return
        with self._gate.quotas.place(entry):
            yield

    def _entry(self) -> KeyEntry | None:
        """Whose call runs; None: everybody may call. Raises UnauthenticatedError."""
        if self._gate is None:
            return None
        caller = CALLER.get()
        if caller is None:
            raise UnauthenticatedError("expected a call with an API key")
        return self._gate.present(caller)

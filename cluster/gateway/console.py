"""The console at `/`: one page, and what it asks for: the state of the drivers, and their rounds.

The page itself needs no key. What it shows of the drivers needs an operator's, where there are keys
(cluster/gateway/middleware.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import time
from base64 import b64encode
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from math import isfinite
from typing import Any

from starlette.responses import Response

from cluster.gateway.counts import SharedCounts
from cluster.gateway.drivers import Driver, DriverPool
from cluster.gateway.metrics import PREFIX
from paceline.errors import OverloadedError, PacelineError, UnavailableError
from paceline.v1 import trace_pb2

Json = dict[str, Any]

MAX_WATCHERS = 32
"""Most callers that watch the rounds at a time, of all drivers together."""

MAX_UNREAD_ROUNDS = 1024
"""Most rounds that are kept for a watcher. One that reads too slowly misses the oldest."""

STATE_SECONDS = 0.5
"""Least time between two questions to the drivers. Whoever asks in between gets the last answer."""

_EVENT_SECONDS = 0.1
"""Time between two events of a watcher while there are rounds."""

_QUIET_SECONDS = 1.0
"""Time between two events while there are none: they show that the connection lives."""

_AGAIN_SECONDS = 1.0
"""Time until a driver is asked again that ended its trace."""

TRACE_MARK = '<script type="application/json" id="trace"></script>'
"""Where the page takes a trace from, if it is a file (`trace_page`)."""

_log = logging.getLogger(__name__)


@cache
def page(name: str = "console.html") -> str:
    """The page, in HTML. `name`: its file; "docs.html" shows /openapi.json."""
    return files("cluster.gateway").joinpath(name).read_text("utf-8")


def trace_page(rounds: list[Json]) -> str:
    """The page with a trace in it. It shows the time line alone, and needs no server."""
    told = json.dumps(rounds, separators=(",", ":")).replace("<", "\\u003c")
    assert TRACE_MARK in page()
    return page().replace(TRACE_MARK, TRACE_MARK.replace("><", f">{told}<"))


@cache
def page_response(name: str = "console.html") -> Response:
    """A page, which may run its own script, and connect to where it came from, and nothing else.

    Browsers compare the script and the style with the digests in the header.
    """
    sources = {
        tag: " ".join(
            f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
            for text in re.findall(rf"(?s)<{tag}>(.*?)</{tag}>", page(name))
        )
        for tag in ("script", "style")
    }
    policy = (
        f"default-src 'none'; script-src {sources['script']}; style-src {sources['style']}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return Response(page(name), headers=headers, media_type="text/html")


def told_round(message: trace_pb2.TraceResponse) -> Json:
    """A message of TraceService as the page reads it. Times and durations are in seconds."""
    match message.WhichOneof("message"):
        case "step":
            step = message.step
            return {
                "step": step.step,
                "group": step.group,
                "sent": step.sent_at,
                "end": step.answered_at,
                "forward": step.forward_seconds,
                "seconds": step.step_seconds,
                "windows": [
                    {
                        "sequence": one.sequence_id,
                        "start": one.start,
                        "fed": one.fed,
                        "window": one.window,
                        "accepted": one.accepted,
                        "committed": one.committed,
                        "passes": list(one.passes),
                    }
                    for one in step.windows
                ],
            }
        case "drafting":
            drafting = message.drafting
            return {
                "pass": drafting.number,
                "drafter": drafting.drafter,
                "end": drafting.received_at,
                "seconds": drafting.pass_seconds,
                "candidates": sum(one.num_candidates for one in drafting.proposals),
                "sequences": [one.sequence_id for one in drafting.proposals],
            }
        case _:
            return {"begun": message.begun.now, "model": message.begun.model}


class Watched:
    def __init__(self, pool: DriverPool, counts: SharedCounts) -> None:
        self._pool = pool
        self._counts = counts
        self._state: Json = {}
        self._asked_at: float | None = None
        self._asking = asyncio.Lock()
        self._rounds: dict[Driver, _Rounds] = {}

    async def state(self) -> Json:
        """What the drivers are and count. Takes at most ASK_SECONDS."""
        async with self._asking:
            now = time.monotonic()
            if self._asked_at is None or now - self._asked_at >= STATE_SECONDS:
                drivers = await asyncio.gather(*map(self._told, self._pool.drivers))
                self._state = {"drivers": drivers, "first_token": self._first_token()}
                self._asked_at = time.monotonic()
            return self._state

    async def _told(self, driver: Driver) -> Json:
        stats, topology = await asyncio.gather(driver.stats(), driver.topology())
        described = driver.description
        told: Json = {
            "address": driver.address,
            "model": self._pool.name(driver),
            "trouble": driver.trouble if described is None else None,
            "stats": None if stats is None else asdict(stats),
            "topology": None if topology is None else asdict(topology),
        }
        if described is not None:
            told["policies"] = described.policies
            told["default_policy"] = described.default_policy
        return {name: _finite(value) for name, value in told.items()}

    def _first_token(self) -> Json:
        """The number of first tokens of the gateways, and the sum of the seconds before them."""
        name, totals = f"{PREFIX}time_to_first_token_seconds", {"count": 0.0, "sum": 0.0}
        for metric in self._counts.collect():
            for sample in metric.samples if metric.name == name else ():
                if (part := sample.name.removeprefix(f"{name}_")) in totals:
                    totals[part] += sample.value
        return totals

    async def rounds(self, address: str | None) -> AsyncGenerator[bytes]:
        """The rounds of a driver as server-sent events, from now on, until the pool is closed.

        `address`: of the driver; None: one that serves. Raises UnavailableError, OverloadedError.
        """
        if sum(len(one.unread) for one in self._rounds.values()) >= MAX_WATCHERS:
            raise OverloadedError(f"{MAX_WATCHERS} callers watch already; try again later")
        if address is None:
            driver = self._pool.choose_any(())
        else:
            found = [one for one in self._pool.drivers if one.address == address]
            if not found:
                raise UnavailableError("there is no driver at the address that was asked for")
            (driver,) = found
        rounds = self._rounds.setdefault(driver, _Rounds(self._pool, driver))
        try:
            async with aclosing(rounds.events()) as events:
                async for event in events:
                    yield event
        finally:
            if not rounds.unread:
                self._rounds.pop(driver, None)


class _Rounds:
    """The rounds of one driver, for all that watch it: one call of Trace while anybody does."""

    def __init__(self, pool: DriverPool, driver: Driver) -> None:
        self._pool = pool
        self._driver = driver
        self.unread: set[_Unread] = set()
        """What each watcher has not read yet."""
        self._begun = ""
        self._ahead = 0.0
        """The driver's clock minus this process's, in seconds."""
        self._reading: asyncio.Task[None] | None = None

    async def events(self) -> AsyncGenerator[bytes]:
        unread = _Unread()
        self.unread.add(unread)
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        elif self._begun:
            unread.told.append(self._begun)
        told_at = 0.0
        try:
            while not self._pool.is_closed:
                now = time.monotonic()
                if unread.told or now - told_at >= _QUIET_SECONDS:
                    rounds = ",".join(unread.told)
                    unread.told.clear()
                    told_at = now
                    yield f'data: {{"now":{now + self._ahead},"rounds":[{rounds}]}}\n\n'.encode()
                await asyncio.sleep(_EVENT_SECONDS)
        finally:
            self.unread.discard(unread)
            if not self.unread and self._reading is not None:
                reading, self._reading, self._begun = self._reading, None, ""
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    async def _read(self) -> None:
        while True:
            try:
                async with aclosing(self._driver.trace()) as messages:
                    async for message in messages:
                        if message.WhichOneof("message") == "begun":
                            self._ahead = message.begun.now - time.monotonic()
                        told = json.dumps(told_round(message), separators=(",", ":"))
                        if message.WhichOneof("message") == "begun":
                            self._begun = told
                        self._tell(told)
                why = "the driver ended the trace"
            except PacelineError as error:
                why = str(error)
            except Exception:  # It ends this reading only; the next begins anew.
                _log.exception("a defect ended the reading of a trace")
                why = "a defect of the gateway; its log tells more"
            self._begun = ""
            self._tell(json.dumps({"lost": why}))
            await asyncio.sleep(_AGAIN_SECONDS)

    def _tell(self, told: str) -> None:
        for unread in self.unread:
            unread.told.append(told)


class _Unread:
    """What a watcher has not read yet, as JSON texts, which watchers share."""

    def __init__(self) -> None:
        self.told: deque[str] = deque(maxlen=MAX_UNREAD_ROUNDS)


def _finite(value: Any) -> Any:
    """The value without numbers that JSON does not have: None is in their place."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value

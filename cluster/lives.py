"""How the controller learns that a worker is lost: its process ends, its server ends, or it hangs.

A worker computes on the event loop that answers questions, so a long step keeps it silent and is no
fault. Silence counts as hanging only where the driver does not hear from the worker either, and the
driver's patience with a step grows with the step's tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from paceline.errors import UnavailableError

QUESTIONS = 4
"""So many in a row stay without an answer before a worker is silent. Where this whole machine was
stopped for a while, the first times out at once, and the second is answered."""
START_SECONDS = 60.0
"""How long the process of an actor may take to be there, once somebody has room for it."""


def longest_silence(hung_after: float) -> float:
    """Seconds from a worker's last answer to the moment at which it is known to hang."""
    return hung_after * (1 + 1 / QUESTIONS)


async def until_lost(
    worker: Any, *, hung_after: float, is_heard: Callable[[], Awaitable[bool]]
) -> str:
    """Return when an actor that serves is lost, and why.

    It hangs when it has not answered for `hung_after` seconds and is not heard elsewhere
    (`is_heard`).
    """
    ways = [
        asyncio.create_task(_until_ended(worker)),
        asyncio.create_task(_until_hung(worker, hung_after, is_heard)),
    ]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        return next(way.result() for way in ways if way.done())
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


async def until_started(worker: Any, name: str, needs: Mapping[str, float]) -> None:
    """Return when the process of an actor answers.

    Raises UnavailableError where it does not within START_SECONDS, saying what it `needs` and what
    is there; RayActorError where it cannot be.
    """
    try:
        await asyncio.wait_for(worker.ping.remote(), START_SECONDS)
    except TimeoutError:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        free = ray.available_resources()
        raise UnavailableError(
            f"{name} has no place: after {START_SECONDS:g} s no node has {_devices(needs)} for it; "
            f"{len(nodes)} live, with {'; '.join(map(_devices, nodes))}, of which "
            f"{_devices(free)} are free; start a node that has as much, or free some"
        ) from None


def _devices(resources: Mapping[str, float]) -> str:
    """The part of Ray's resources that we reserve."""
    return ", ".join(f"{resources.get(kind, 0):g} {kind}s" for kind in ("CPU", "GPU"))


async def _until_ended(worker: Any) -> str:
    try:
        await worker.wait.remote()
    except RayError as error:
        return str(error).strip().splitlines()[0]
    return "its server has stopped"


async def _until_hung(
    worker: Any, hung_after: float, is_heard: Callable[[], Awaitable[bool]]
) -> str:
    seconds = hung_after / QUESTIONS
    unanswered = 0
    while True:
        try:
            await asyncio.wait_for(worker.ping.remote(), seconds)
        except TimeoutError:
            unanswered += 1
            if unanswered >= QUESTIONS and not await is_heard():
                return f"it has not answered for {hung_after:g} s and is taken for hung"
        except RayError:  # Its process has ended, which `wait` tells as well, and says why.
            await asyncio.sleep(seconds)
        else:
            unanswered = 0
            await asyncio.sleep(seconds)

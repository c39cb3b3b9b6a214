"""How the controller learns that a worker is lost.

Its process ends, its server ends, it hangs, or it answers but fails all requests. A worker computes
on the event loop that answers questions, so a long step makes it silent without a fault. Silence
counts as hanging only if the driver hears nothing from the worker either. The driver's patience
with a step grows with the step's tokens. A broken connection alone does not mean that a worker is
lost: Ray reports which of the two it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import PlacementGroup, placement_group_table

from cluster.config.fields import GPU_LABEL
from cluster.placement.actor_calls import answer_of
from cluster.placement.plan import GroupPlan
from paceline.errors import UnavailableError

QUESTIONS = 4
"""Unanswered questions in a row after which a worker counts as silent. If the whole machine was
stopped for a while, the first question times out at once and the second is answered."""
ROOM_SECONDS = 10.0
"""How long Ray may look for a node to replace a lost one before we report that it finds none."""
RECENT_SECONDS = 600.0
"""How long the end of a process counts as recent. Several recent ends make pauses longer."""
FIRST_PAUSE = 0.5
"""Seconds before the second try. Each further pause is twice as long. The first try is at once."""
LONGEST_PAUSE = 30.0
"""Longest pause before a try, so a device that comes back is soon in use."""
MOVE_AFTER = 4
"""Recent ends in one place after which another place is tried."""
_LOOK_SECONDS = 0.5
_USELESS_SECONDS = 5.0
_WAIT_SECONDS = 60.0
_NAMED_NODES = 8
"""Most nodes whose devices a message names."""


@dataclass(slots=True)
class RecentEnds:
    """Recent times, by a monotonic clock, at which a worker's process ended or failed to start."""

    _times: list[float] = field(default_factory=list)

    def add(self, now: float) -> None:
        self._times = [one for one in self._times if now - one < RECENT_SECONDS] + [now]

    @property
    def pause(self) -> float:
        again = len(self._times) - 2
        return 0.0 if again < 0 else min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(again, 16))

    @property
    def wants_another_place(self) -> bool:
        return bool(self._times) and len(self._times) % MOVE_AFTER == 0


def longest_silence(hung_after: float) -> float:
    """Seconds from a worker's last answer until it is known to hang."""
    return hung_after * (1 + 1 / QUESTIONS)


async def until_lost(
    worker: Any,
    *,
    hung_after: float,
    is_heard: Callable[[], Awaitable[bool]],
    why_useless: Callable[[], Awaitable[str | None]] | None = None,
) -> str:
    """Wait until a serving actor is lost. Returns the reason.

    It hangs if it has not answered for `hung_after` seconds and `is_heard` returns False: the
    driver hears nothing from it either. `why_useless`: why the driver cannot use it; None: it can.
    """
    ways = [
        asyncio.create_task(_until_ended(worker)),
        asyncio.create_task(_until_hung(worker, hung_after, is_heard)),
    ]
    if why_useless is not None:
        ways.append(asyncio.create_task(_until_useless(why_useless)))
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        return next(way.result() for way in ways if way.done())
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


async def until_started(
    worker: Any,
    name: str,
    plan: GroupPlan,
    group: PlacementGroup,
    *,
    seconds: float,
    tell: Callable[[str], Awaitable[None]],
) -> None:
    """Wait until the process of an actor in a placement group answers.

    If the group lost a node and Ray has no other, this waits for one and reports from time to time
    what is needed and what the nodes have. Raises UnavailableError if the process does not answer
    within `seconds` once it has a place, and RayActorError if it cannot be started.
    """
    answer = asyncio.ensure_future(answer_of(worker.ping.remote))
    since = time.monotonic()
    had_room, tell_at = True, since
    try:
        while not (await asyncio.wait({answer}, timeout=_LOOK_SECONDS))[0]:
            now = time.monotonic()
            has_room = await asyncio.to_thread(_has_room, group)
            if has_room != had_room:
                had_room, since, tell_at = has_room, now, now + ROOM_SECONDS
            if not has_room and now >= tell_at:
                await tell(await asyncio.to_thread(_no_room, name, plan))
                tell_at = now + ROOM_SECONDS
            if has_room and now - since > seconds:
                raise UnavailableError(
                    f"{name}: its process did not answer within {seconds:g} s of its start"
                )
        await answer
    finally:
        answer.cancel()


def _has_room(group: PlacementGroup) -> bool:
    return bool(placement_group_table(group)["state"] == "CREATED")


def _no_room(name: str, plan: GroupPlan) -> str:
    return (
        f"{name} has no place: its group needs {room_needed(plan)}. {room_there()}: start a node "
        "that has as much, or free some"
    )


def room_needed(plan: GroupPlan) -> str:
    """What a placement group needs, and where."""
    needs = " + ".join(
        _devices(bundle) + "".join(f", {key}={value}" for key, value in selector.items())
        for bundle, selector in zip(plan.bundles, plan.selectors, strict=True)
    )
    return f"{needs} on {'one node' if plan.strategy == 'STRICT_PACK' else 'the nodes'}"


def room_there() -> str:
    """What the living nodes have, and what of it is free."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    nodes = [_devices(node["Resources"]) + _labels(node["Labels"]) for node in alive[:_NAMED_NODES]]
    more = len(alive) - len(nodes)
    return (
        f"The {len(alive)} living nodes have {'; '.join(nodes)}"
        f"{f'; and {more} more' if more else ''}, of which "
        f"{_devices(ray.available_resources())} are free"
    )


def _devices(resources: Mapping[str, float]) -> str:
    """What we reserve among Ray's resources: CPUs, GPUs, memory."""
    words = ", ".join(f"{resources.get(kind, 0):g} {kind}s" for kind in ("CPU", "GPU"))
    memory = resources.get("memory", 0)
    return f"{words}, {memory / 2**30:.1f} GiB" if memory else words


def _labels(labels: Mapping[str, str]) -> str:
    """The labels by which a worker may choose a node: all but those that every node has."""
    own = [
        f"{key}={value}"
        for key, value in labels.items()
        if key == GPU_LABEL or not key.startswith("ray.io/")
    ]
    return f" ({', '.join(own)})" if own else ""


async def _until_ended(worker: Any) -> str:
    try:
        while not await answer_of(partial(worker.wait.remote, _WAIT_SECONDS)):
            pass
    except RayError as error:
        return str(error).strip().splitlines()[0]
    return "its server has stopped"


async def _until_hung(
    worker: Any, hung_after: float, is_heard: Callable[[], Awaitable[bool]]
) -> str:
    seconds = hung_after / QUESTIONS
    unanswered = 0
    while True:
        ask_at = time.monotonic() + seconds
        try:
            # `wait_for` would lose a cancellation that coincides with an error of the call. A
            # worker that ended with a question open would then never be found lost.
            async with asyncio.timeout(seconds):
                await worker.ping.remote()
        except (TimeoutError, ActorUnavailableError):
            unanswered += 1
            if unanswered >= QUESTIONS and not await is_heard():
                return f"it has not answered for {hung_after:g} s and counts as hung"
        except RayError:  # The process has ended. `wait` reports it too, with the reason.
            pass
        else:
            unanswered = 0
        await asyncio.sleep(max(0.0, ask_at - time.monotonic()))


async def _until_useless(why_useless: Callable[[], Awaitable[str | None]]) -> str:
    while (why := await why_useless()) is None:
        await asyncio.sleep(_USELESS_SECONDS)
    return f"it answers, and fails what it is asked: {why}"

"""A coroutine that begins at once: its results, exceptions and cancellation are a task's."""

from __future__ import annotations

import asyncio

import pytest

from workers.process.threads import Begun


async def test_it_runs_to_its_first_wait_before_anybody_awaits_it() -> None:
    ran: list[str] = []
    gate = asyncio.get_running_loop().create_future()

    async def work() -> int:
        ran.append("begun")
        first: int = await gate
        await asyncio.sleep(0)
        ran.append("over")
        return first + 1

    begun = Begun(work())
    assert ran == ["begun"]
    gate.set_result(4)
    assert await begun == 5
    assert ran == ["begun", "over"]


async def test_one_that_is_waited_for_goes_on_when_its_future_is_done() -> None:
    gate = asyncio.get_running_loop().create_future()

    async def work() -> str:
        told: str = await gate
        return told

    begun = Begun(work())
    asyncio.get_running_loop().call_soon(gate.set_result, "done")
    assert await begun == "done"


async def test_what_it_raises_comes_when_it_is_awaited_not_before() -> None:
    async def work() -> None:
        raise ValueError("at once")

    begun = Begun(work())
    with pytest.raises(ValueError, match="at once"):
        await begun


async def test_a_failed_future_raises_inside_it() -> None:
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def work() -> str:
        try:
            await gate
        except ConnectionError:
            return "heard"
        return "not heard"

    begun = Begun(work())
    gate.set_exception(ConnectionError())
    assert await begun == "heard"


async def test_a_cancelled_task_tells_it() -> None:
    told: list[str] = []
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def work() -> None:
        try:
            await gate
        except asyncio.CancelledError:
            told.append("cancelled")
            raise

    begun = Begun(work())

    async def wait() -> None:
        await begun

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert told == ["cancelled"]
    assert gate.cancelled()


async def test_one_that_nobody_awaits_any_more_is_closed() -> None:
    told: list[str] = []
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def work() -> None:
        try:
            await gate
        finally:
            told.append("closed")

    Begun(work()).cancel()
    assert told == ["closed"]
    assert gate.cancelled()

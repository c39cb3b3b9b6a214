"""Calls to Ray actors. A PacelineError that an actor raises arrives unchanged."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from paceline.errors import PacelineError, UnavailableError, WorkerLostError

_AGAIN_SECONDS = 0.5


async def answer_of(ask: Callable[[], Awaitable[Any]]) -> Any:
    """The answer of an actor to a question that may be asked more than once.

    The question is repeated while Ray cannot reach the actor but does not report it lost, because a
    broken connection does not mean that the process ended. Raises what the call raises.
    """
    while True:
        try:
            return await ask()
        except ActorUnavailableError:
            await asyncio.sleep(_AGAIN_SECONDS)


async def outcome_of(call: Awaitable[Any], name: str, *, log: str = "") -> Any:
    """The result of a call to an actor. `name`: the worker's; `log`: path of its log.

    Raises the PacelineError that the actor raised, WorkerLostError if its process ended, and
    UnavailableError for other failures of Ray.
    """
    try:
        return await call
    except RayTaskError as error:
        raise cause_of(error) from None
    except RayActorError as error:
        where = f"{log} on its host" if log else "Ray's logs"
        raise WorkerLostError(
            f"{name}: its process ended ({first_line(error)}); the reason is in {where}"
        ) from None
    except RayError as error:
        raise UnavailableError(f"{name}: {first_line(error)}") from None


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or the name of its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def cause_of(error: RayTaskError) -> Exception:
    """What an actor's method raised: a PacelineError as it is, others wrapped with their text."""
    cause: Exception = error.cause
    if isinstance(cause, BaseExceptionGroup):
        ours = [one for one in cause.exceptions if isinstance(one, PacelineError)]
        cause = ours[0] if ours else cause
    if isinstance(cause, PacelineError):
        return cause
    return UnavailableError(f"a worker failed: {type(cause).__name__}: {cause}")

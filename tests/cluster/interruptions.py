"""Events in the middle of a request."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from paceline import (
    Chunk,
    Completion,
    GenerateOptions,
)
from paceline.generation import CompletionBuilder
from tests.cluster.system import (
    System,
)

OPTIONS = GenerateOptions(
    temperature=1.0, seed=11, max_tokens=120, ignore_eos=True, policy="chain", window=4
)
PROMPT = "The quick brown fox jumps"


async def plain_answer(system: System) -> Completion:
    """The answer of plain decoding."""
    return await system.client.generate(PROMPT, replace(OPTIONS, policy="off"))


async def interrupted(
    system: System, options: GenerateOptions, *acts: Callable[[], Awaitable[object]]
) -> tuple[Completion, float]:
    """Run a request during which each act happens, 30 tokens apart.

    Returns its answer, and its longest pause in seconds.
    """
    builder = CompletionBuilder()
    left = list(acts)
    pause, last = 0.0, None
    async for event in system.client.stream(PROMPT, options):
        now = time.monotonic()
        pause = max(pause, now - last) if last is not None else 0.0
        builder.add(event)
        if isinstance(event, Chunk) and left and event.offset >= 30 * (len(acts) - len(left) + 1):
            await left.pop(0)()
            now = time.monotonic()
        last = now
    assert not left
    return builder.build(), pause


def port_of(address: str) -> int:
    """The port in "host:port"."""
    return int(address.rpartition(":")[2])

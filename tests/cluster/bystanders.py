"""A well-behaved request that runs through a fault."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Unpack

from paceline import Chunk, Completion
from paceline.generation import CompletionBuilder
from paceline.options import OptionFields
from tests.cluster.interruptions import OPTIONS, PROMPT
from tests.cluster.system import System, eventually

_plain: dict[tuple[Path, str], Completion] = {}
"""Answers of plain decoding, by the checkpoint and the options."""


@dataclass
class Bystander:
    """The tokens that a well-behaved request has received."""

    token_ids: list[int] = field(default_factory=list)

    async def grows(self, tokens: int) -> None:
        """Wait until it has this many more tokens."""
        enough = len(self.token_ids) + tokens
        await eventually(lambda: len(self.token_ids) >= enough)


@asynccontextmanager
async def bystander(system: System, **changes: Unpack[OptionFields]) -> AsyncIterator[Bystander]:
    """Run a request before and through the block. It must end with the text of plain decoding.

    That text is computed beforehand with policy `off`, once for each checkpoint. `changes`: changes
    of its options; it has 300 tokens by default.
    """
    options = replace(replace(OPTIONS, max_tokens=300), **changes)
    without = replace(options, policy="off")
    asked = system.driver._options.folder, repr(without)
    plain = _plain.get(asked)
    if plain is None:
        plain = _plain[asked] = await system.client.generate(PROMPT, without)
    seen = Bystander()

    async def run() -> Completion:
        builder = CompletionBuilder()
        async for event in system.client.stream(PROMPT, options):
            builder.add(event)
            if isinstance(event, Chunk):
                seen.token_ids += event.token_ids
        return builder.build()

    task = asyncio.create_task(run())
    try:
        await seen.grows(1)
        yield seen
        answer = await task
        assert answer.token_ids == plain.token_ids
        assert answer.finish_reason == plain.finish_reason
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

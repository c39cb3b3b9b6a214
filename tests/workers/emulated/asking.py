"""Requests to a driver without a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from cluster.driver.driver import Driver
from paceline.generation import Completion, CompletionBuilder
from paceline.options import GenerateOptions


async def complete(driver: Driver, prompt: Sequence[int], options: GenerateOptions) -> Completion:
    builder = CompletionBuilder()
    async for event in await driver.submit(list(prompt), options):
        builder.add(event)
    return builder.build()


async def answers(
    driver: Driver, prompts: Sequence[Sequence[int]], options: GenerateOptions
) -> list[Completion]:
    """Answer all prompts at once. End tokens are ignored; the seed of each is its index."""
    asked = (replace(options, seed=row, ignore_eos=True) for row in range(len(prompts)))
    pairs = zip(prompts, asked, strict=True)
    return list(await asyncio.gather(*(complete(driver, *pair) for pair in pairs)))

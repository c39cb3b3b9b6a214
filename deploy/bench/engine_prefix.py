"""Part "prefix" of `bench engine`: prompts that begin alike, with the prefix cache and without.

Each prompt is the shared begin and something of its own, all are asked for at once, and what is
measured is the time until every one has its first token. Both deployments are plain targets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.config_model import Config
from deploy.bench.decode import CORES
from deploy.bench.deployments import running_side_by_side
from deploy.bench.engine_load import random_tokens
from deploy.bench.engine_rows import OFF, EngineRow, EngineTask
from paceline.client import AsyncClient, Client
from paceline.options import GenerateOptions

PART = "prefix"
CACHE = "prefix cache"
SHARED_TOKENS = 800
OWN_TOKENS = 24
PROMPTS, QUICK_PROMPTS = 100, 8
_TEXT_PROMPTS, _TEXT_TOKENS = 4, 16
"""So many prompts are continued by so many tokens, to compare texts beyond the first token."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """All first tokens, further text of a few prompts, and what it took to have the former."""

    first_tokens: Sequence[Sequence[int]]
    texts: Sequence[Sequence[int]]
    seconds: float
    prefilled_tokens: int
    hit_tokens: int
    steps: int


def measure_prefix(task: EngineTask) -> list[EngineRow]:
    """Two rows, `off` without the cache; `speedup` is the ratio of their times."""
    files = task.target_files()
    count = QUICK_PROMPTS if task.quick else PROMPTS
    with running_side_by_side(deployments(task.config), home=task.home, tell=task.tell) as clients:
        description = clients[OFF].describe()
        # A short context, as of a tiny checkpoint, holds fewer shared tokens.
        longest = description.max_model_len - OWN_TOKENS - _TEXT_TOKENS
        prompts = prompts_that_begin_alike(
            count, min(SHARED_TOKENS, longest), vocab_size=description.vocab_size
        )
        measured = {}
        for name, client in clients.items():
            task.tell(f"prefix: {name}, {count} prompts")
            measured[name] = _measure(client, prompts, vocab_size=description.vocab_size)
    off = measured[OFF]
    return [
        EngineRow(
            part=PART,
            name=name,
            engine="paceline",
            batch=count,
            window=0,
            degree=1,
            dtype=files.weights,
            threads=CORES,
            step_ms=1000 * one.seconds / one.steps,
            speedup=off.seconds / one.seconds,
            details={
                "seconds": one.seconds,
                "prompt_tokens": sum(map(len, prompts)),
                "prefill_tokens_per_second": sum(map(len, prompts)) / one.seconds,
                "prefilled_tokens": one.prefilled_tokens,
                "prefix_hit_tokens": one.hit_tokens,
                "same_text": (one.first_tokens, one.texts) == (off.first_tokens, off.texts),
            },
        )
        for name, one in measured.items()
    ]


def deployments(config: Config) -> dict[str, Config]:
    """Plain targets, by the names of their rows."""
    server = config.server.model_copy(update={"http_port": 0, "grpc_port": 0})
    fixed = {"threads": CORES, "tensor_parallel": 1}

    def plain(prefix_cache: bool) -> Config:
        target = config.target.model_copy(update={**fixed, "prefix_cache": prefix_cache})
        return config.model_copy(update={"target": target, "drafters": (), "server": server})

    return {OFF: plain(prefix_cache=False), CACHE: plain(prefix_cache=True)}


def prompts_that_begin_alike(count: int, shared: int, *, vocab_size: int) -> list[list[int]]:
    """Random tokens; the same arguments give the same prompts."""
    begin = random_tokens(shared, vocab_size=vocab_size, seed=1)
    return [
        begin + random_tokens(OWN_TOKENS, vocab_size=vocab_size, seed=2 + number)
        for number in range(count)
    ]


def _measure(client: Client, prompts: Sequence[Sequence[int]], *, vocab_size: int) -> Prefilled:
    warm_up = random_tokens(SHARED_TOKENS // 4, vocab_size=vocab_size, seed=0)
    asyncio.run(_ask(client.address, [warm_up], max_tokens=4))
    before = client.stats()
    start = time.perf_counter()
    first_tokens = asyncio.run(_ask(client.address, prompts, max_tokens=1))
    seconds = time.perf_counter() - start
    after = client.stats()
    few = prompts[:_TEXT_PROMPTS]
    return Prefilled(
        first_tokens=first_tokens,
        texts=asyncio.run(_ask(client.address, few, max_tokens=_TEXT_TOKENS)),
        seconds=seconds,
        prefilled_tokens=after.prefilled_tokens - before.prefilled_tokens,
        hit_tokens=after.prefix_hit_tokens - before.prefix_hit_tokens,
        steps=after.steps - before.steps,
    )


async def _ask(
    address: str, prompts: Sequence[Sequence[int]], *, max_tokens: int
) -> list[tuple[int, ...]]:
    options = GenerateOptions(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, policy="off")
    async with AsyncClient(address) as client:
        answers = await asyncio.gather(
            *(client.generate(list(prompt), options) for prompt in prompts)
        )
    return [answer.token_ids for answer in answers]

"""Part "delay" of `bench engine`: what a long prompt does to the tokens of others.

Sequences decode plainly; then comes a prompt of 1,500 tokens. A delay is counted in steps of the
same batch without it: the longest time between two tokens of a sequence while the prompt is
prefilled, over the usual time, less the one step that it takes in any case.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise

from cluster.config_model import Config
from deploy.bench.decode import CORES
from deploy.bench.deployments import running_side_by_side
from deploy.bench.engine_load import random_tokens
from deploy.bench.engine_rows import BATCHES, OFF, EngineRow, EngineTask
from paceline.client import AsyncClient
from paceline.generation import Chunk, GenerateOptions, ModelDescription

PART = "delay"
PROMPT_TOKENS = 1500
_OWN_PROMPT = 20
_BEFORE, _QUICK_BEFORE = 24, 8
"""Tokens that every sequence has before the prompt comes: the usual time is taken over these."""


def measure_delay(task: EngineTask) -> list[EngineRow]:
    """A row for each batch of those who decode."""
    config = deployment(task.config)
    with running_side_by_side({OFF: config}, home=task.home, tell=task.tell) as clients:
        client = clients[OFF]
        description = client.describe()
        rows = []
        for batch in task.batches_of(BATCHES):
            task.tell(f"delay: batch {batch}")
            delay = asyncio.run(_Delay(description, batch, quick=task.quick).run(client.address))
            rows.append(_row(task, batch, delay))
    return rows


def deployment(config: Config) -> Config:
    """The configured target without drafters, on any free ports."""
    server = config.server.model_copy(update={"http_port": 0, "grpc_port": 0})
    target = config.target.model_copy(
        update={"threads": CORES, "tensor_parallel": 1, "max_num_seqs": max(BATCHES) + 1}
    )
    return config.model_copy(update={"target": target, "drafters": (), "server": server})


def delay_in_steps(usual: Sequence[float], beside: Sequence[float]) -> float:
    """The longest of the times between two tokens beside a prompt, in usual ones, less that one."""
    return max(beside) / statistics.median(usual) - 1


def all_but_a_twentieth(times: Sequence[float]) -> Sequence[float]:
    """Without the longest ones: a busy host holds up a step now and then."""
    return sorted(times)[: max(1, len(times) * 19 // 20)]


class _Delay:
    """One measurement: who decodes, when their tokens came, and when the prompt was there."""

    def __init__(self, description: ModelDescription, batch: int, *, quick: bool) -> None:
        self._vocab_size = description.vocab_size
        self._batch = batch
        self._before = _QUICK_BEFORE if quick else _BEFORE
        longest = description.max_model_len
        self.prompt_tokens = min(PROMPT_TOKENS, longest - 1)
        self._max_tokens = min(1000, longest - _OWN_PROMPT)
        self._times: list[list[float]] = [[] for _ in range(batch)]
        self._warm = asyncio.Event()
        self.usual: list[float] = []
        self.beside: list[float] = []

    async def run(self, address: str) -> _Delay:
        async with AsyncClient(address) as client:
            tasks = [asyncio.create_task(self._decode(client, n)) for n in range(self._batch)]
            await self._warm.wait()
            # Of its own, else the prefix cache has it from the batch before.
            tokens = random_tokens(
                self.prompt_tokens, vocab_size=self._vocab_size, seed=1000 + self._batch
            )
            began = time.perf_counter()
            await client.generate(tokens, _options(1))
            ended = time.perf_counter()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for times in self._times:
            for earlier, later in pairwise(times[self._before // 2 :]):
                if later < began:
                    self.usual.append(later - earlier)
                elif earlier < ended:
                    self.beside.append(later - earlier)
        return self

    async def _decode(self, client: AsyncClient, number: int) -> None:
        prompt = random_tokens(_OWN_PROMPT, vocab_size=self._vocab_size, seed=1 + number)
        async for event in client.stream(prompt, _options(self._max_tokens)):
            if isinstance(event, Chunk):
                self._times[number].append(time.perf_counter())
                if min(map(len, self._times)) >= self._before:
                    self._warm.set()


def _options(max_tokens: int) -> GenerateOptions:
    return GenerateOptions(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, policy="off")


def _row(task: EngineTask, batch: int, delay: _Delay) -> EngineRow:
    return EngineRow(
        part=PART,
        name=OFF,
        engine="paceline",
        batch=batch,
        window=0,
        degree=1,
        dtype=task.target_files().weights,
        threads=CORES,
        step_ms=statistics.median(delay.usual) * 1000,
        details={
            "prompt_tokens": delay.prompt_tokens,
            "steps_beside": len(delay.beside) // batch,
            "median_ms_beside": statistics.median(delay.beside) * 1000,
            "delay_steps": delay_in_steps(delay.usual, delay.beside),
            "delay_steps_p95": delay_in_steps(delay.usual, all_but_a_twentieth(delay.beside)),
            # What the host does to a step when nothing of ours is new.
            "delay_steps_without": delay_in_steps(delay.usual, delay.usual),
        },
    )

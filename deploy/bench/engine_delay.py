"""Part "delay" of `bench engine`: what a long prompt does to the tokens of others.

Sequences decode plainly; then comes a prompt of 1,500 tokens, and when it is done, and as many
tokens came without it as beside it, another one. A delay is counted in steps of the same batch
without a prompt: the time between two tokens of a sequence while one is prefilled, over the usual
time, less the one step that it takes in any case. The longest is told beside the longest of the
times without: a busy host holds up a step now and then, whatever is in it. How long the target's
threads stood in line for a core is measured besides (core_waits.py), of the first sequence's steps:
what a delay is without that is told apart.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

from cluster.config_model import Config
from deploy.bench.core_waits import CoreWaits, longest_wait
from deploy.bench.decode import CORES
from deploy.bench.deployments import running_side_by_side
from deploy.bench.engine_load import random_tokens
from deploy.bench.engine_rows import BATCHES, OFF, EngineRow, EngineTask
from paceline.client import AsyncClient
from paceline.generation import Chunk, ModelDescription
from paceline.options import GenerateOptions

PART = "delay"
PROMPT_TOKENS = 1500
PROMPTS, QUICK_PROMPTS = 3, 1
_OWN_PROMPT = 20
_BEFORE, _QUICK_BEFORE = 24, 8
"""Tokens that every sequence has before the first prompt; of the first half no time counts."""


def measure_delay(task: EngineTask) -> Iterator[EngineRow]:
    """A row for each batch of those who decode."""
    config = deployment(task.config)
    with running_side_by_side({OFF: config}, home=task.home, tell=task.tell) as clients:
        client = clients[OFF]
        description = client.describe()
        (pid,) = (worker.pid for worker in client.stats().workers if worker.kind == "target")
        for batch in task.batches_of(BATCHES):
            task.tell(f"delay: batch {batch}")
            delay = asyncio.run(
                _Delay(description, batch, pid=pid, quick=task.quick).run(client.address)
            )
            yield _row(task, batch, delay)


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
    """One measurement: who decodes, when their tokens came, and when prompts were there."""

    def __init__(self, description: ModelDescription, batch: int, *, pid: int, quick: bool) -> None:
        self._pid = pid
        self._vocab_size = description.vocab_size
        self._batch = batch
        self._prompts = QUICK_PROMPTS if quick else PROMPTS
        self._before = _QUICK_BEFORE if quick else _BEFORE
        longest = description.max_model_len
        self.prompt_tokens = min(PROMPT_TOKENS, longest - 1)
        self._max_tokens = min(1000, longest - _OWN_PROMPT)
        self._times: list[list[float]] = [[] for _ in range(batch)]
        self._waits: CoreWaits | None = None
        # When the first sequence had a token, and what the target's threads had waited by then.
        self._readings: list[tuple[float, list[float]]] = []
        self._awaited = self._before
        self._there = asyncio.Event()
        self._error: BaseException | None = None
        self.usual: list[float] = []
        """Seconds between two tokens of a sequence without a prompt."""
        self.beside: list[list[float]] = []
        """The same while it was there, by prompt."""
        self.computing: list[float] = []
        """Those of the first sequence, of all prompts, less what the target's threads waited."""
        self.prefill_seconds: list[float] = []

    async def run(self, address: str) -> _Delay:
        spans = []
        async with AsyncClient(address) as client:
            tasks = [asyncio.create_task(self._decode(client, n)) for n in range(self._batch)]
            for task in tasks:
                task.add_done_callback(self._ended)
            await self._until(self._before)
            self._waits = CoreWaits(self._pid, CORES)
            self._readings.append((self._times[0][-1], self._waits.read()))
            for number in range(self._prompts):
                first = min(map(len, self._times))
                # Of its own, else the prefix cache has it from the one before.
                tokens = random_tokens(
                    self.prompt_tokens,
                    vocab_size=self._vocab_size,
                    seed=1000 * (1 + number) + self._batch,
                )
                began = time.perf_counter()
                await client.generate(tokens, _options(1))
                spans.append((began, time.perf_counter()))
                now = min(map(len, self._times))
                await self._until(now + max(now - first, self._before))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._sort_times(spans)
        return self

    def _sort_times(self, spans: Sequence[tuple[float, float]]) -> None:
        """Tell the times between two tokens apart, by when they began and ended."""
        self.prefill_seconds = [ended - began for began, ended in spans]
        self.beside = [[] for _ in spans]
        for times in self._times:
            for earlier, later in pairwise(times[self._before // 2 :]):
                for beside, span in zip(self.beside, spans, strict=True):
                    if _overlap(span, earlier, later):
                        beside.append(later - earlier)
                        break
                else:
                    self.usual.append(later - earlier)
        for (earlier, before), (later, after) in pairwise(self._readings):
            if any(_overlap(span, earlier, later) for span in spans):
                self.computing.append(later - earlier - longest_wait(before, after))

    @property
    def longest_less_waits(self) -> float | None:
        """A delay in steps; None where the system does not count what threads wait for a core."""
        if self._waits is None or not self._waits.are_known or not self.computing:
            return None
        return delay_in_steps(self.usual, self.computing)

    async def _until(self, tokens: int) -> None:
        """Wait until every sequence has so many tokens, or one has all that it may have."""
        self._awaited = tokens
        self._there.clear()
        self._look()
        await self._there.wait()
        if self._error is not None:
            raise self._error

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Nobody waits for the tokens of one that failed."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = error
            self._there.set()

    def _look(self) -> None:
        if min(map(len, self._times)) >= min(self._awaited, self._max_tokens):
            self._there.set()

    async def _decode(self, client: AsyncClient, number: int) -> None:
        prompt = random_tokens(_OWN_PROMPT, vocab_size=self._vocab_size, seed=1 + number)
        async for event in client.stream(prompt, _options(self._max_tokens)):
            if isinstance(event, Chunk):
                now = time.perf_counter()
                self._times[number].append(now)
                if number == 0 and self._waits is not None:
                    self._readings.append((now, self._waits.read()))
                self._look()


def _overlap(span: tuple[float, float], earlier: float, later: float) -> bool:
    began, ended = span
    return began < later and earlier < ended


def _options(max_tokens: int) -> GenerateOptions:
    return GenerateOptions(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, policy="off")


def _row(task: EngineTask, batch: int, delay: _Delay) -> EngineRow:
    usual, by_prompt = delay.usual, delay.beside
    beside = [seconds for times in by_prompt for seconds in times]
    return EngineRow(
        part=PART,
        name=OFF,
        engine="paceline",
        batch=batch,
        window=0,
        degree=1,
        dtype=task.target_files().weights,
        threads=CORES,
        step_ms=statistics.median(usual) * 1000,
        details={
            "prompt_tokens": delay.prompt_tokens,
            "prefill_tokens_per_second": delay.prompt_tokens
            / statistics.median(delay.prefill_seconds),
            "steps_beside": len(beside) // batch,
            "steps_without": len(usual) // batch,
            "median_ms_beside": statistics.median(beside) * 1000,
            "delay_steps": delay_in_steps(usual, beside),
            "delay_steps_by_prompt": [delay_in_steps(usual, times) for times in by_prompt],
            "delay_steps_p95": delay_in_steps(usual, all_but_a_twentieth(beside)),
            "delay_steps_less_waits": delay.longest_less_waits,
            # What the host does to a step when nothing of ours is new.
            "delay_steps_without": delay_in_steps(usual, usual),
            "delay_steps_without_p95": delay_in_steps(usual, all_but_a_twentieth(usual)),
        },
    )

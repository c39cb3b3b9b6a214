"""One measurement of one cell: a fresh driver, the cell's requests, what its meters say."""

from __future__ import annotations

import asyncio
import gc
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.decoding.policies import PolicyName
from cluster.driver import Driver, DriverOptions
from deploy.bench.lookahead_cells import Cell
from deploy.bench.lookahead_load import LoadRequest, rounds_of, warm_up_of
from deploy.bench.lookahead_pairs import Pair
from paceline.generation import Chunk, CompletionBuilder, Stats
from paceline.options import GenerateOptions
from workers.emulated.replay_text import Guess


@dataclass(frozen=True, slots=True)
class CellRun:
    """What one measurement gave.

    Idle shares are of the time that was measured, a drafter's None without one. `step_ms` and
    `draft_ms`: the mean pass of the target and of the drafters. `gap_ms`: the median time between
    two passes of the target with work at hand. `overruns`: emulated passes for which this machine
    was too slow. Times are those of the devices, where they are dilated.
    """

    texts: tuple[tuple[int, ...], ...]
    tokens_per_second: float
    acceptance_length: float
    target_idle: float
    drafter_idle: float | None
    step_ms: float
    draft_ms: float | None
    gap_ms: float
    overruns: int


async def measure_cell(
    pair: Pair, cell: Cell, load: Sequence[LoadRequest], guess: Guess
) -> CellRun:
    """Decode `load`, `cell.batch` requests at a time. `guess`: how the pair's drafters do."""
    drafters: Mapping[str, str] = {}
    if cell.policy is not PolicyName.OFF:
        drafters = pair.drafters(cell.rtt_ms, guess, cell.num_drafters)
    driver = Driver(
        DriverOptions(
            folder=pair.folder,
            target_addresses=pair.target_addresses[: cell.num_targets],
            target_groups=cell.num_targets,
            drafter_addresses=drafters,
            max_num_seqs=max(64, cell.batch),
            max_step_tokens=2048,
            prefix_cache=False,
            dilation=pair.dilation,
        )
    )
    try:
        await driver.start()
        await _decode(driver, cell, warm_up_of(load, cell.batch))
        gc.collect()
        gc.freeze()
        return await _decode(driver, cell, load)
    finally:
        gc.unfreeze()
        await driver.stop()


async def _decode(driver: Driver, cell: Cell, load: Sequence[LoadRequest]) -> CellRun:
    before = driver.stats()
    answers: list[_Answer] = []
    tokens, seconds = 0, 0.0
    for requests in rounds_of(load, cell.batch):
        together = await asyncio.gather(*(_request(driver, cell, one) for one in requests))
        answers += together
        # What counts is from when all have a first token to the last one of all.
        first = max(answer.arrivals[0][0] for answer in together)
        seconds += max(answer.arrivals[-1][0] for answer in together) - first
        tokens += sum(answer.tokens_after(first) for answer in together)
    after = driver.stats()
    elapsed = after.uptime_seconds - before.uptime_seconds
    busy, passes = _spent(before, after)
    targets = [one.name for one in after.workers if one.kind == "target"]
    step_seconds = sum(busy.pop(name) for name in targets)
    steps = sum(passes.pop(name) for name in targets)
    drafts = sum(passes.values())
    return CellRun(
        texts=tuple(answer.token_ids for answer in answers),
        tokens_per_second=tokens / seconds if seconds else 0.0,
        acceptance_length=sum(len(answer.token_ids) for answer in answers)
        / sum(answer.steps for answer in answers),
        target_idle=max(0.0, 1 - step_seconds / elapsed / len(targets)),
        drafter_idle=max(0.0, 1 - statistics.mean(busy.values()) / elapsed) if busy else None,
        step_ms=1000 * step_seconds / steps,
        draft_ms=1000 * sum(busy.values()) / drafts if drafts else None,
        gap_ms=after.gap_ms_p50,
        overruns=sum(one.overruns for one in after.workers)
        - sum(one.overruns for one in before.workers),
    )


def _spent(before: Stats, after: Stats) -> tuple[dict[str, float], dict[str, int]]:
    """By worker: seconds that it was busy, and passes."""
    pairs = list(zip(before.workers, after.workers, strict=True))
    return (
        {late.name: late.busy_seconds - early.busy_seconds for early, late in pairs},
        {late.name: late.passes - early.passes for early, late in pairs},
    )


@dataclass(frozen=True, slots=True)
class _Answer:
    """`arrivals`: of each chunk, when (by the driver's clock), and of how many tokens."""

    token_ids: tuple[int, ...]
    steps: int
    arrivals: tuple[tuple[float, int], ...]

    def tokens_after(self, moment: float) -> int:
        return sum(count for at, count in self.arrivals if at > moment)


async def _request(driver: Driver, cell: Cell, request: LoadRequest) -> _Answer:
    options = GenerateOptions(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_k=0,
        top_p=1.0,
        seed=request.seed,
        ignore_eos=True,
        policy=cell.policy.value,
        window=cell.window or None,
        branches=cell.branches,
        stopping="fixed",
    )
    builder = CompletionBuilder()
    arrivals: list[tuple[float, int]] = []
    async for event in await driver.submit(list(request.prompt), options):
        builder.add(event)
        if isinstance(event, Chunk) and event.token_ids:
            arrivals.append((driver.clock.now(), len(event.token_ids)))
    completion = builder.build()
    return _Answer(completion.token_ids, completion.stats.steps, tuple(arrivals))

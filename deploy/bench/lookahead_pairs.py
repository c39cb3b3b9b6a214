"""Runs a cell of `bench lookahead`: on emulated workers, or in the simulator."""

from __future__ import annotations

import asyncio
import gc
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from cluster.decoding.events import Request
from cluster.driver.driver import Driver, DriverOptions
from cluster.driver.round_tap import RoundTap
from cluster.simulation.fleet import Fleet
from cluster.simulation.layout import HostCosts, Layout
from cluster.simulation.layout import Load as SimulatedLoad
from cluster.simulation.trial import in_swing_of
from deploy.bench.lookahead_cells import Cell, LoadRequest, rounds_of, warm_up_of
from deploy.bench.processes import WorkerProcesses
from paceline.generation import Chunk, CompletionBuilder, Stats
from paceline.options import GenerateOptions
from paceline.v1 import trace_pb2
from workers.emulated.profiles import DeviceProfile, LinkProfile
from workers.emulated.replay_text import Guess, ReplayText

LOOPBACK_RTT_MS = 0.1
"""For a round trip of at most this, the link is plain loopback, whose gRPC round trip is longer
anyway. The simulator then has no link, since its costs include loopback."""
FITTED_PROCESSES = 1.5
"""Processes per core when the simulator's costs were fitted: driver, target and drafter on 2 cores.
"""
CROWDING = 0.25
"""Share that each process beyond FITTED_PROCESSES per core adds to all costs, because it needs a
core too. This value is fitted."""


@dataclass(frozen=True, slots=True)
class PairLayout:
    """The processes to start: latency profiles, numbers of drafters and targets, links, guesses."""

    target_profile: str
    drafter_profile: str
    num_drafters: int
    rtts_ms: tuple[float, ...]
    guesses: tuple[Guess, ...]
    num_targets: int = 1


class EmulatedPair(WorkerProcesses):
    """Processes that replay. Idle ones take no processor time."""

    def __init__(self, layout: PairLayout, stand_in: Path, log_folder: Path) -> None:
        """`stand_in`: the checkpoint of workers/models/stand_in.py."""
        super().__init__(log_folder)
        self.folder = stand_in
        self.target_addresses: tuple[str, ...] = ()
        self._layout = layout
        self._drafters: dict[tuple[float, Guess], dict[str, str]] = {}

    def drafters(self, rtt_ms: float, guess: Guess, count: int) -> Mapping[str, str]:
        """Addresses by name of `count` drafters at the end of a link, which guess like `guess`."""
        found = self._drafters[rtt_ms, guess]
        return dict(list(found.items())[:count])

    def start(self) -> None:
        """Launch targets, drafters and links. Returns when all of them serve."""
        layout = self._layout
        targets = [
            self.launch(
                f"target-{number}",
                "workers.emulated.target",
                [str(self.folder), "--profile", layout.target_profile],
            )
            for number in range(layout.num_targets)
        ]
        spelled = [_spell(guess) for guess in layout.guesses]
        drafters = {
            name: self.launch(
                name,
                "workers.emulated.drafter",
                [str(self.folder), *spelled, "--profile", layout.drafter_profile],
            )
            for name in (f"drafter-{number}" for number in range(layout.num_drafters))
        }
        self.target_addresses = tuple(address for one in targets for address in one.addresses(1))
        for name, drafter in drafters.items():
            near = drafter.addresses(len(spelled))
            for rtt_ms in layout.rtts_ms:
                ends = near
                if rtt_ms > LOOPBACK_RTT_MS:
                    relay = self.launch(
                        f"link-{name}-{rtt_ms:g}ms",
                        "workers.emulated.relay",
                        [*near, "--rtt-ms", str(rtt_ms)],
                    )
                    ends = relay.addresses(len(near))
                for guess, address in zip(layout.guesses, ends, strict=True):
                    self._drafters.setdefault((rtt_ms, guess), {})[name] = address


def _spell(guess: Guess) -> str:
    """The guess as workers/emulated/drafter.py reads it from its command line."""
    return f"{guess.acceptance}/{guess.hit_rate}/{guess.seed}"


# Measured


@dataclass(frozen=True, slots=True)
class CellRun:
    """The result of one measurement.

    Idle shares are of the measured time. `drafter_idle` is None without drafters. `step_ms` and
    `draft_ms`: the mean pass of the target and of the drafters. `gap_ms`: the median time between
    two passes of the target with work at hand. `overruns`: emulated passes for which this machine
    was too slow.
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
    pair: EmulatedPair,
    cell: Cell,
    load: Sequence[LoadRequest],
    guess: Guess,
    *,
    on_round: Callable[[trace_pb2.TraceResponse], None] | None = None,
) -> CellRun:
    """Decode `load`, `cell.batch` requests at a time. `guess`: how the pair's drafters guess.

    `on_round` gets all rounds of the load, as TraceService would tell them.
    """
    drafters: Mapping[str, str] = {}
    if cell.drafts:
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
        )
    )
    try:
        await driver.start()
        await _decode(driver, cell, warm_up_of(load, cell.batch))
        gc.collect()
        gc.freeze()
        with driver.tapped(_tap(on_round)) if on_round is not None else nullcontext():
            return await _decode(driver, cell, load)
    finally:
        gc.unfreeze()
        await driver.stop()


def _tap(on_round: Callable[[trace_pb2.TraceResponse], None]) -> RoundTap:
    def on_failure(error: Exception) -> None:
        raise error

    return RoundTap(on_round, time.monotonic, on_failure=on_failure)


async def _decode(driver: Driver, cell: Cell, load: Sequence[LoadRequest]) -> CellRun:
    before = driver.stats()
    answers: list[_Answer] = []
    tokens, seconds = 0, 0.0
    for requests in rounds_of(load, cell.batch):
        together = await asyncio.gather(*(_request(driver, cell, one) for one in requests))
        answers += together
        # Count from the moment when all have a first token to the last token of all.
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
    """The busy seconds of each worker between two readings, and its passes."""
    pairs = list(zip(before.workers, after.workers, strict=True))
    return (
        {late.name: late.busy_seconds - early.busy_seconds for early, late in pairs},
        {late.name: late.passes - early.passes for early, late in pairs},
    )


@dataclass(frozen=True, slots=True)
class _Answer:
    """`arrivals`: for each chunk, its time by the driver's clock and its number of tokens."""

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
        policy=cell.policy,
        window=cell.window or None,
        branches=cell.branches,
        stopping="fixed",
    )
    builder = CompletionBuilder()
    arrivals: list[tuple[float, int]] = []
    async for event in await driver.submit(list(request.prompt), options):
        builder.add(event)
        if isinstance(event, Chunk) and event.token_ids:
            arrivals.append((time.monotonic(), len(event.token_ids)))
    completion = builder.build()
    return _Answer(completion.token_ids, completion.stats.steps, tuple(arrivals))


# Simulated


def simulated_speed(
    cell: Cell,
    load: Sequence[LoadRequest],
    guess: Guess,
    text: ReplayText,
    *,
    target: DeviceProfile,
    drafter: DeviceProfile,
) -> float:
    """Tokens/s of a cell in the simulator, counted as `measure_cell` does.

    It has the same requests, luck, profiles and policy. So the comparison with the measured speed
    shows how well the simulator's costs of driver, drafters and messages fit
    (cluster/simulation/layout.py).
    """
    off = not cell.drafts
    layout = Layout(
        target=target,
        policy=cell.policy,
        window=max(1, cell.window),
        drafter=None if off else drafter,
        drafters=0 if off else cell.num_drafters,
        replicas=cell.num_targets,
        branches=cell.branches,
        link=LinkProfile(rtt_ms=cell.rtt_ms if cell.rtt_ms > LOOPBACK_RTT_MS else 0.0),
        max_num_seqs=max(64, cell.batch),
        prefix_cache=False,
        costs=_costs_here(cell),
    )
    rounds = [warm_up_of(load, cell.batch), *rounds_of(load, cell.batch)]
    starts = list(accumulate(map(len, rounds), initial=0))
    asked = SimulatedLoad(
        requests=starts[-1],
        prompt_tokens=len(load[0].prompt),
        output_tokens=load[0].max_tokens,
        guess=guess,
        concurrency=cell.batch,
    )
    requests = [
        [_simulated_request(number, cell, one) for number, one in enumerate(together, start=start)]
        for start, together in zip(starts, rounds, strict=False)
    ]
    fleet = Fleet(layout, asked, rounds=requests, text=text)
    fleet.run()
    answers = {one.request.sequence_id: one for one in fleet.answered}
    tokens, seconds = 0, 0.0
    for start, end in pairwise(starts[1:]):
        counted, lasted = in_swing_of([answers[number] for number in range(start, end)])
        tokens += counted
        seconds += lasted
    return tokens / seconds


def _costs_here(cell: Cell) -> HostCosts:
    """The simulator's costs on this host, whose cores driver, targets and drafters share."""
    processes = 1 + cell.num_targets + (cell.num_drafters if cell.drafts else 0)
    beyond = processes - FITTED_PROCESSES * len(os.sched_getaffinity(0))
    return HostCosts().times(1 + CROWDING * max(0.0, beyond))


def _simulated_request(number: int, cell: Cell, one: LoadRequest) -> Request:
    return Request(
        sequence_id=number,
        prompt_token_ids=one.prompt,
        spec=one.spec(),
        max_tokens=one.max_tokens,
        policy=cell.policy,
        window=max(1, cell.window),
        branches=cell.branches,
    )

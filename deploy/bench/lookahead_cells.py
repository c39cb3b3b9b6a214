"""The cells of `bench lookahead`: what they decode, on which emulated pair, and their measurement.

Luck must not change the results: over 800 tokens, luck alone changes the speed by 4 to 5 %. So the
seeds of the drafters' guesses are those of SEEDS, made for answers of 150 to 240 tokens.
"""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.decoding.policies.chain import CHAIN
from cluster.decoding.policies.fanout import FANOUT
from cluster.decoding.policies.off import OFF
from cluster.decoding.policy import POLICIES, LookaheadPolicy, policy_named
from cluster.driver.driver import Driver, DriverOptions
from cluster.driver.round_tap import RoundTap
from cluster.simulation.closed_forms import best_lockstep_window
from cluster.simulation.trial import in_swing_of
from deploy.bench.harness import batches_of
from deploy.bench.processes import WorkerProcess
from paceline.generation import Chunk, Completion, CompletionBuilder, WorkerStats
from paceline.options import GenerateOptions
from paceline.sampling import SequenceSpec
from paceline.v1 import trace_pb2
from workers.emulated.latency_profiles import DeviceProfile
from workers.emulated.replay_text import Guess, spec_of
from workers.models.stand_in import NUM_RESERVED, VOCAB_SIZE, make_stand_in

PARALLEL = "parallel"
"""The part with a parallel drafter."""

RTTS_MS = (0.1, 2.0, 10.0)
LOOPBACK_RTT_MS = 0.1
"""For a round trip of at most this, the link is plain loopback, whose gRPC round trip is longer
anyway."""
ACCEPTANCES = (0.75, 0.85)
HIT_RATES = (0.85, 0.5, 0.0)
SEEDS: Mapping[float, int] = {0.75: 350, 0.85: 279}
"""By acceptance, the seed of 2,000 whose luck is nearest to that of an endless text. Over the first
150, 160, 200 and 240 tokens of `requests_of(1, ...)`, the share of right guesses and the tokens per
step of lockstep, pearl and fanout are within 2.7 % of their expectations.
"""
BATCHES = (8, 64)
"""Batches besides 1. They are measured without a link, at the higher acceptance."""
CHAIN_WINDOW = 8
FANOUT_WINDOW = 12
"""Window of policies with branches, for one sequence with a set acceptance."""
TREE_WINDOW, TREE_BRANCHES, TREE_BATCH = 32, 4, 8
"""Shape of the cell with trees that measures the time between steps."""
FANOUT_TREE_WINDOW, FANOUT_TREE_BRANCHES = 32, 2
"""Shape of the cells of fanout and spread that also verify the branches that they send ahead."""
AUTO_WINDOW = 32
"""Upper bound on the windows of `auto` on the emulated pair."""
NUM_SPREAD_TREE = 4 if len(os.sched_getaffinity(0)) >= 4 else 2
"""Drafters of the cells of spread that verify trees. Four drafters and the driver need 1.6 cores
together; on two cores they wait for each other.
"""

PROMPT_LENGTH = 16
TEMPERATURES = (0.0, 1.0)
WARM_UP_TOKENS, MOST_WARM_UPS = 12, 8


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy under one condition. `num_drafters`: drafters of the layout.

    `acceptance`, `hit_rate`: the rates that are set. None: not used. `parallel`: with a drafter of
    that kind.
    """

    policy: str
    rtt_ms: float
    acceptance: float | None
    hit_rate: float | None
    batch: int
    window: int
    branches: int = 1
    num_drafters: int = 1
    parallel: bool = False

    @property
    def guess(self) -> Guess:
        if self.acceptance is None:
            return Guess(0.0, 0.0, 0)
        return Guess(self.acceptance, self.hit_rate or 0.0, SEEDS[self.acceptance])

    @property
    def num_targets(self) -> int:
        return policy_named(self.policy).needs.groups

    @property
    def drafts(self) -> bool:
        return policy_named(self.policy).drafts

    @property
    def name(self) -> str:
        """A name for people, unique among the cells."""
        batch = "" if self.batch == 1 else f", batch {self.batch}"
        parallel = f", {PARALLEL}" if self.parallel else ""
        if not self.drafts:
            return f"off{parallel}{batch}"
        rates = f", acceptance {self.acceptance:g}"
        rates += "" if self.hit_rate is None else f", hits {self.hit_rate:g}"
        tree = f", trees of {self.window}" if self.branches > 1 else ""
        tree += f", {self.num_drafters} drafters" if self.num_drafters > 1 else ""
        return f"{self.policy}, rtt {self.rtt_ms:g} ms{parallel}{rates}{tree}{batch}"


def part_names() -> tuple[str, ...]:
    """Parts that can be measured alone: a policy, or all with a parallel drafter."""
    return (*(policy.name for policy in _policies()), PARALLEL)


def cells(
    target: DeviceProfile, drafter: DeviceProfile, *, quick: bool, parts: Sequence[str] = ()
) -> list[Cell]:
    """All cells except plain decoding. `quick`: one per policy. `parts`: only these."""
    conditions = [(RTTS_MS[0], ACCEPTANCES[1], 1)]
    if not quick:
        conditions = [(rtt_ms, one, 1) for rtt_ms in RTTS_MS for one in ACCEPTANCES]
        conditions += [(RTTS_MS[0], ACCEPTANCES[1], batch) for batch in BATCHES]

    def window_of(policy: LookaheadPolicy, acceptance: float, rtt_ms: float, batch: int) -> int:
        if policy.adapts:
            return AUTO_WINDOW
        if policy.drafting_is_free:
            return FANOUT_WINDOW if policy.fans_out and batch == 1 else CHAIN_WINDOW
        step_ms, draft_ms = (one.pass_ms.ms(batch, batch) for one in (target, drafter))
        return best_lockstep_window(acceptance, step_ms=step_ms, draft_ms=draft_ms, rtt_ms=rtt_ms)

    found: list[Cell] = []
    for policy in _policies():
        if parts and policy.name not in parts:
            continue
        for rtt_ms, acceptance, batch in conditions:
            window = window_of(policy, acceptance, rtt_ms, batch)
            hit_rates: Sequence[float | None] = HIT_RATES[:1] if policy.fans_out else (None,)
            if policy is FANOUT and batch == 1 and not quick:
                hit_rates = HIT_RATES
            found += [
                Cell(
                    policy.name,
                    rtt_ms,
                    acceptance,
                    hit_rate,
                    batch,
                    window,
                    num_drafters=max(1, policy.needs.drafters),
                )
                for hit_rate in hit_rates
            ]
        if not quick:
            found += _trees_of(policy)
    if PARALLEL in parts or not (parts or quick):
        found += _parallel()
    return found


def _policies() -> list[LookaheadPolicy]:
    return [policy for policy in POLICIES.all().values() if policy.drafts]


def _parallel() -> Iterator[Cell]:
    """The cells with a parallel drafter, at the higher acceptance."""
    shapes = {
        "chain": (2 * CHAIN_WINDOW, 1),
        "fanout": (FANOUT_TREE_WINDOW, FANOUT_TREE_BRANCHES),
        "auto": (AUTO_WINDOW, 1),
    }
    for name, (window, branches) in shapes.items():
        hits = HIT_RATES[0] if policy_named(name).fans_out else None
        for rtt_ms in RTTS_MS:
            yield Cell(name, rtt_ms, ACCEPTANCES[1], hits, 1, window, branches, parallel=True)


def plain_cell(batch: int, *, parallel: bool = False) -> Cell:
    """Plain decoding of `batch` sequences, beside cells with or without a parallel drafter."""
    return Cell(OFF.name, RTTS_MS[0], None, None, batch, 0, parallel=parallel)


def _trees_of(policy: LookaheadPolicy) -> Iterator[Cell]:
    if policy is CHAIN:
        acceptance, hit_rate = ACCEPTANCES[1], HIT_RATES[0]
        tree = (TREE_BATCH, TREE_WINDOW, TREE_BRANCHES)
        yield Cell(policy.name, RTTS_MS[0], acceptance, hit_rate, *tree)
    if policy.fans_out and not (policy.adapts or policy.needs.chains_only):
        drafters = NUM_SPREAD_TREE if policy.spreads else 1
        shape = (1, FANOUT_TREE_WINDOW, FANOUT_TREE_BRANCHES, drafters)
        for rtt_ms in RTTS_MS:
            for acceptance in ACCEPTANCES:
                yield Cell(policy.name, rtt_ms, acceptance, HIT_RATES[0], *shape)


# What they decode


@dataclass(frozen=True, slots=True)
class LoadRequest:
    prompt: tuple[int, ...]
    temperature: float
    seed: int
    max_tokens: int

    def spec(self) -> SequenceSpec:
        return spec_of(len(self.prompt), self.temperature, self.seed)


def requests_of(batch: int, max_tokens: int) -> list[LoadRequest]:
    """`batch` requests at each temperature, of `max_tokens` tokens."""
    return [
        LoadRequest(_prompt(number, temperature), temperature, 1000 + number, max_tokens)
        for temperature in TEMPERATURES
        for number in range(batch)
    ]


def warm_up_of(load: Sequence[LoadRequest], batch: int) -> list[LoadRequest]:
    """A few tokens of the first requests, decoded before anything counts."""
    first = load[: min(batch, MOST_WARM_UPS)]
    return [replace(one, max_tokens=min(WARM_UP_TOKENS, one.max_tokens)) for one in first]


def _prompt(number: int, temperature: float) -> tuple[int, ...]:
    first = 64 + number * PROMPT_LENGTH + int(temperature) * 1600
    return tuple(
        NUM_RESERVED + (first + place) % (VOCAB_SIZE - NUM_RESERVED)
        for place in range(PROMPT_LENGTH)
    )


# The pair


@dataclass(frozen=True, slots=True)
class EmulatedPair:
    """Processes that replay. Idle ones take no processor time.

    `folder`: the checkpoint. `drafter_addresses`: by link and guess, and then by name.
    """

    folder: Path
    target_addresses: tuple[str, ...]
    drafter_addresses: Mapping[tuple[float, Guess], Mapping[str, str]]

    def drafters(self, rtt_ms: float, guess: Guess, count: int) -> Mapping[str, str]:
        """Addresses by name of `count` drafters at the end of a link, which guess like `guess`."""
        found = self.drafter_addresses[rtt_ms, guess]
        return dict(list(found.items())[:count])


@contextmanager
def emulated_pair(
    target_profile: str,
    drafter_profile: str,
    *,
    rtts_ms: Collection[float],
    guesses: Collection[Guess],
    num_drafters: int = 1,
    num_targets: int = 1,
) -> Iterator[EmulatedPair]:
    """Targets, drafters and links, which serve while the block runs. Raises UnavailableError."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        logs = Path(name)
        folder = make_stand_in(logs / "stand-in")

        def launch(name: str, module: str, *arguments: str) -> WorkerProcess:
            process = WorkerProcess(module, arguments, log=logs / f"{name}.log")
            stack.callback(process.end)
            return process

        def replay(name: str, role: str, profile: str, *arguments: str) -> WorkerProcess:
            module = f"workers.emulated.{role}"
            return launch(name, module, str(folder), *arguments, "--profile", profile)

        targets = [
            replay(f"target-{number}", "target", target_profile) for number in range(num_targets)
        ]
        # As workers/emulated/drafter.py reads them.
        spelled = [f"{one.acceptance}/{one.hit_rate}/{one.seed}" for one in guesses]
        names = [f"drafter-{number}" for number in range(num_drafters)]
        drafters = {name: replay(name, "drafter", drafter_profile, *spelled) for name in names}
        target_addresses = tuple(address for one in targets for address in one.addresses(1))
        found: dict[tuple[float, Guess], dict[str, str]] = defaultdict(dict)
        for name, drafter in drafters.items():
            near = drafter.addresses(len(spelled))
            for rtt_ms in rtts_ms:
                ends = near
                if rtt_ms > LOOPBACK_RTT_MS:
                    link = (f"link-{name}-{rtt_ms:g}ms", "workers.emulated.relay")
                    ends = launch(*link, *near, "--rtt-ms", str(rtt_ms)).addresses(len(near))
                for guess, address in zip(guesses, ends, strict=True):
                    found[rtt_ms, guess][name] = address
        yield EmulatedPair(folder, target_addresses, found)


def pair_for(
    target_profile: str, drafter_profile: str, cells: Sequence[Cell]
) -> AbstractContextManager[EmulatedPair]:
    """A pair on which these cells can be measured."""
    return emulated_pair(
        target_profile,
        drafter_profile,
        rtts_ms=sorted({cell.rtt_ms for cell in cells}),
        guesses=list(dict.fromkeys(cell.guess for cell in cells)),
        num_drafters=max(cell.num_drafters for cell in cells),
        num_targets=max(cell.num_targets for cell in cells),
    )


# Measuring


@dataclass(frozen=True, slots=True)
class CellRun:
    """The result of one measurement.

    Idle shares are of the measured time. `drafter_idle` is None without drafters. `step_ms` and
    `draft_ms`: the mean pass of the target and of the drafters. `gap_ms`: the median time between
    two passes of the target with work at hand; None: there were none. `overruns`: emulated
    passes for which this machine was too slow.
    """

    texts: tuple[tuple[int, ...], ...]
    tokens_per_second: float
    acceptance_length: float
    target_idle: float
    drafter_idle: float | None
    step_ms: float
    draft_ms: float | None
    gap_ms: float | None
    overruns: int


async def measure_cell(
    pair: EmulatedPair,
    cell: Cell,
    load: Sequence[LoadRequest],
    *,
    on_round: Callable[[trace_pb2.TraceResponse], None] | None = None,
) -> CellRun:
    """Decode `load`, `cell.batch` requests at a time.

    `on_round` gets all rounds of the load, as TraceService would tell them.
    """
    drafters: Mapping[str, str] = {}
    if cell.drafts:
        drafters = pair.drafters(cell.rtt_ms, cell.guess, cell.num_drafters)
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
    answers: list[Completion] = []
    tokens, seconds = 0, 0.0
    for requests in batches_of(load, cell.batch):
        together = await asyncio.gather(*(_request(driver, cell, one) for one in requests))
        answers += [completion for completion, _ in together]
        counted, lasted = in_swing_of([arrivals for _, arrivals in together])
        tokens += counted
        seconds += lasted
    after = driver.stats()
    elapsed = after.uptime_seconds - before.uptime_seconds
    pairs = list(zip(before.workers, after.workers, strict=True))
    targets = [pair for pair in pairs if pair[1].kind == "target"]
    drafters = [pair for pair in pairs if pair[1].kind != "target"]
    (step_seconds, steps), (draft_seconds, drafts) = _spent(targets), _spent(drafters)
    return CellRun(
        texts=tuple(answer.token_ids for answer in answers),
        tokens_per_second=tokens / seconds if seconds else 0.0,
        acceptance_length=sum(len(answer.token_ids) for answer in answers)
        / sum(answer.stats.steps for answer in answers),
        target_idle=max(0.0, 1 - step_seconds / elapsed / len(targets)),
        drafter_idle=max(0.0, 1 - draft_seconds / elapsed / len(drafters)) if drafters else None,
        step_ms=1000 * step_seconds / steps,
        draft_ms=1000 * draft_seconds / drafts if drafts else None,
        gap_ms=after.gap_ms_p50 or None,  # 0: none was counted.
        overruns=sum(late.overruns - early.overruns for early, late in pairs),
    )


def _spent(workers: Sequence[tuple[WorkerStats, WorkerStats]]) -> tuple[float, int]:
    """The seconds of all passes between two readings of each worker, and their number."""
    return (
        sum(late.busy_seconds - early.busy_seconds for early, late in workers),
        sum(late.passes - early.passes for early, late in workers),
    )


async def _request(
    driver: Driver, cell: Cell, request: LoadRequest
) -> tuple[Completion, list[tuple[float, int]]]:
    """The answer, and for each of its chunks the time of arrival and the number of tokens."""

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
    return builder.build(), arrivals

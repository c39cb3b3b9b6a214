"""`paceline bench lookahead`: policies on an emulated 70B pair, over real gRPC and the real driver.

Workers are processes that replay (workers/emulated); the driver runs in this one. Plain decoding
is measured in the same run, and every cell's text must equal its.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from cluster.decoding.policies import PolicyName
from cluster.driver import Driver, DriverOptions
from deploy.bench.emulated_pair import EmulatedPair, PairLayout
from deploy.bench.lookahead_cells import (
    ACCEPTANCES,
    HIT_RATES,
    NEEDS_BRANCHES,
    RTTS_MS,
    Cell,
    cells,
    plain_cell,
)
from deploy.bench.lookahead_load import LoadRequest, pinned_guess, recorded_load, set_load
from paceline.generation import Chunk, CompletionBuilder, GenerateOptions
from workers.emulated.profiles import DeviceProfile, load_profile
from workers.emulated.recording import Recording, load_recording
from workers.emulated.replay_text import Guess
from workers.emulated.stand_in import make_stand_in

TARGET_PROFILE = "70b-4xh100"
DRAFTER_PROFILE = "1b-h100"
BATCHED_TOKENS = 64
"""Tokens a request where many are decoded at once."""
WARM_UP_TOKENS = 12


@dataclass(frozen=True, slots=True)
class LookaheadSettings:
    """How much is measured. `max_tokens`: a request; `repeats`: rounds over all cells."""

    max_tokens: int
    repeats: int
    quick: bool


FULL = LookaheadSettings(400, 2, quick=False)
QUICK = LookaheadSettings(200, 1, quick=True)


@dataclass(frozen=True, slots=True)
class CellRun:
    """One measurement of one cell. Idle shares are of the time that was measured."""

    texts: tuple[tuple[int, ...], ...]
    tokens_per_second: float
    acceptance_length: float
    target_idle: float
    drafter_idle: float | None
    gap_ms: float


@dataclass(slots=True)
class CellResult:
    """A cell and its runs; the run whose speed is the median stands for it."""

    cell: Cell
    acceptance: float
    runs: list[CellRun] = field(default_factory=list)

    @property
    def median(self) -> CellRun:
        """By speed; the lower of the two in the middle."""
        middle = statistics.median_low(run.tokens_per_second for run in self.runs)
        return next(run for run in self.runs if run.tokens_per_second == middle)

    @property
    def spread(self) -> float:
        """(fastest - slowest) / median."""
        speeds = [run.tokens_per_second for run in self.runs]
        return (max(speeds) - min(speeds)) / statistics.median(speeds)


@dataclass(frozen=True, slots=True)
class LookaheadResult:
    """All that was measured. `plain`: by (batch, recorded), the cells of policy off."""

    target: DeviceProfile
    drafter: DeviceProfile
    plain: Mapping[tuple[int, bool], CellResult]
    cells: Sequence[CellResult]


class LookaheadBench:
    """The cells of one run, once everything is started."""

    def __init__(
        self,
        pair: EmulatedPair,
        stand_in: Path,
        recording: Recording,
        guesses: Mapping[tuple[float | None, float | None], Guess],
        settings: LookaheadSettings,
    ) -> None:
        self._pair = pair
        self._stand_in = stand_in
        self._recording = recording
        self._guesses = guesses
        self._settings = settings

    async def run(
        self, wanted: Sequence[Cell], *, tell: Callable[[str], None]
    ) -> tuple[dict[tuple[int, bool], CellResult], list[CellResult]]:
        """Every cell once a round, plain decoding first."""
        plain = {
            key: CellResult(plain_cell(key[0]), 0.0)
            for key in sorted({(cell.batch, cell.acceptance is None) for cell in wanted})
        }
        results = [CellResult(cell, self._acceptance(cell)) for cell in wanted]
        total = self._settings.repeats * (len(plain) + len(results))
        done = 0
        for _ in range(self._settings.repeats):
            for (_, recorded), result in plain.items():
                done += 1
                tell(f"{done} of {total}: {result.cell.name}")
                result.runs.append(await self._measure(result.cell, recorded=recorded))
            for result in results:
                done += 1
                tell(f"{done} of {total}: {result.cell.name}")
                recorded = result.cell.acceptance is None
                result.runs.append(await self._measure(result.cell, recorded=recorded))
        return plain, results

    def _acceptance(self, cell: Cell) -> float:
        return self._recording.acceptance if cell.acceptance is None else cell.acceptance

    def _load(self, batch: int, *, recorded: bool) -> list[LoadRequest]:
        tokens = self._settings.max_tokens if batch == 1 else BATCHED_TOKENS
        return recorded_load(self._recording, tokens) if recorded else set_load(batch, tokens)

    async def _measure(self, cell: Cell, *, recorded: bool) -> CellRun:
        load = self._load(cell.batch, recorded=recorded)
        drafters: Mapping[str, str] = {}
        if cell.policy is not PolicyName.OFF:
            guess = self._guesses[cell.acceptance, cell.hit_rate]
            drafters = self._pair.drafters(cell.rtt_ms, guess, cell.num_drafters)
        driver = Driver(
            DriverOptions(
                folder=self._stand_in,
                target_addresses=(self._pair.target_address,),
                drafter_addresses=drafters,
                max_num_seqs=max(64, cell.batch),
                max_step_tokens=2048,
                prefix_cache=False,
            )
        )
        try:
            await driver.start()
            warm_up = [LoadRequest((999,), 0.0, 0, WARM_UP_TOKENS)] * min(cell.batch, 8)
            await self._decode(driver, cell, warm_up)
            gc.collect()
            gc.freeze()
            return await self._decode(driver, cell, load)
        finally:
            await driver.stop()

    async def _decode(self, driver: Driver, cell: Cell, load: Sequence[LoadRequest]) -> CellRun:
        before = driver.stats()
        texts: list[tuple[int, ...]] = []
        tokens = steps = 0
        seconds = 0.0
        for start in range(0, len(load), cell.batch):
            answers = await asyncio.gather(
                *(_request(driver, cell, one) for one in load[start : start + cell.batch])
            )
            texts += [answer.token_ids for answer in answers]
            # What counts is from the first token of all to the last one of all.
            first = max(answer.first_at for answer in answers)
            seconds += max(answer.last_at for answer in answers) - first
            tokens += sum(answer.tokens_after(first) for answer in answers)
            steps += sum(answer.steps for answer in answers)
        after = driver.stats()
        elapsed = after.uptime_seconds - before.uptime_seconds
        busy = {
            worker.name: worker.busy_seconds - earlier.busy_seconds
            for worker, earlier in zip(after.workers, before.workers, strict=True)
        }
        target = busy.pop("shard-0")
        return CellRun(
            texts=tuple(texts),
            tokens_per_second=tokens / seconds,
            acceptance_length=sum(map(len, texts)) / steps,
            target_idle=max(0.0, 1 - target / elapsed),
            drafter_idle=max(0.0, 1 - statistics.mean(busy.values()) / elapsed) if busy else None,
            gap_ms=after.gap_ms_p50,
        )


@dataclass(frozen=True, slots=True)
class _Answer:
    token_ids: tuple[int, ...]
    steps: int
    arrivals: tuple[tuple[float, int], ...]

    @property
    def first_at(self) -> float:
        return self.arrivals[0][0]

    @property
    def last_at(self) -> float:
        return self.arrivals[-1][0]

    def tokens_after(self, moment: float) -> int:
        return sum(count for at, count in self.arrivals if at > moment)


async def _request(driver: Driver, cell: Cell, request: LoadRequest) -> _Answer:
    options = GenerateOptions(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        seed=request.seed,
        ignore_eos=True,
        policy=cell.policy.value,
        window=cell.window,
        branches=2 if cell.policy.value in NEEDS_BRANCHES else 1,
    )
    builder = CompletionBuilder()
    arrivals: list[tuple[float, int]] = []
    async for event in await driver.submit(list(request.prompt), options):
        builder.add(event)
        if isinstance(event, Chunk) and event.token_ids:
            arrivals.append((time.perf_counter(), len(event.token_ids)))
    completion = builder.build()
    return _Answer(completion.token_ids, completion.stats.steps, tuple(arrivals))


def run_lookahead(settings: LookaheadSettings, *, tell: Callable[[str], None]) -> LookaheadResult:
    """Start the emulated pair, measure, end it."""
    target = load_profile(TARGET_PROFILE, role="target")
    drafter = load_profile(DRAFTER_PROFILE, role="drafter")
    recording_path = Path(str(files("workers.emulated") / "recordings" / "demo.json"))
    recording = load_recording(recording_path)
    wanted = cells(target, drafter, quick=settings.quick)
    tell("choosing luck that is no better than the long run")
    guesses = _guesses(wanted, settings.max_tokens)
    with tempfile.TemporaryDirectory() as scratch:
        stand_in = make_stand_in(Path(scratch) / "stand-in")
        layout = PairLayout(
            TARGET_PROFILE,
            DRAFTER_PROFILE,
            max(cell.num_drafters for cell in wanted),
            tuple(rtt for rtt in RTTS_MS if any(cell.rtt_ms == rtt for cell in wanted)),
            tuple(guesses.values()),
            recording_path,
        )
        tell("starting the emulated workers")
        with EmulatedPair(layout, stand_in, Path(scratch)) as pair:
            bench = LookaheadBench(pair, stand_in, recording, guesses, settings)
            plain, results = asyncio.run(bench.run(wanted, tell=tell))
    return LookaheadResult(target, drafter, plain, results)


def _guesses(
    wanted: Sequence[Cell], max_tokens: int
) -> dict[tuple[float | None, float | None], Guess]:
    """How drafters guess, by the cells' acceptance and hit rate. The luck is that of one seed."""
    found: dict[tuple[float | None, float | None], Guess] = {}
    load = set_load(1, max_tokens)
    for acceptance in ACCEPTANCES:
        keys = {(c.acceptance, c.hit_rate) for c in wanted if c.acceptance == acceptance}
        if not keys:
            continue
        if acceptance is None:
            found[None, None] = Guess(None, None)
            continue
        seed = pinned_guess(acceptance, HIT_RATES[-1], load).seed
        for _, hit_rate in sorted(keys, key=lambda key: key[1] or 0.0):
            found[acceptance, hit_rate] = Guess(acceptance, hit_rate or 0.0, seed)
    return found

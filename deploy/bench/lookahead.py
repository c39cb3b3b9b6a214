"""`paceline bench lookahead`: policies on an emulated 70B pair, over real gRPC and the real driver.

Emulated workers are processes that replay (workers/emulated); the driver runs in this one. Plain
decoding is measured in the same run, and every cell's text must equal its. The demo pair, which
computes, is measured beside them on real processor time.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from cluster.decoding.policies import PolicyName
from deploy.bench.lookahead_cells import (
    ACCEPTANCES,
    HIT_RATES,
    NATURAL,
    RTTS_MS,
    Cell,
    Load,
    cells,
    plain_cell,
)
from deploy.bench.lookahead_load import LoadRequest, pinned_guess, recorded_load, set_load
from deploy.bench.lookahead_measure import CellRun, measure_cell
from deploy.bench.lookahead_pairs import EmulatedPair, NaturalPair, Pair, PairLayout
from deploy.bench.lookahead_simulated import simulated_speed
from deploy.bench.record_replay import demo_recording, recording_path
from workers.emulated.profiles import DeviceProfile, load_profile
from workers.emulated.recording import Recording
from workers.emulated.replay_text import Guess, ReplayText
from workers.emulated.stand_in import VOCAB_SIZE, make_stand_in
from workers.models import resolve_model

TARGET_PROFILE = "70b-4xh100"
DRAFTER_PROFILE = "1b-h100"
BATCHED_TOKENS = 64
"""Tokens a request where many are decoded at once."""
AS_IT_DOES = Guess(None, None)
"""As recorded, or as a drafter that computes does."""

Rates = tuple[float | None, float | None]
"""The acceptance and hit rate of a cell."""


@dataclass(frozen=True, slots=True)
class LookaheadSettings:
    """How much is measured.

    `max_tokens`: a request; `repeats`: rounds over all cells; `parts`: of lookahead_cells, or all.
    """

    max_tokens: int
    repeats: int
    quick: bool
    parts: tuple[str, ...] = ()


FULL = LookaheadSettings(320, 2, quick=False)
QUICK = LookaheadSettings(200, 1, quick=True)


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
    """All that was measured. `plain`: by (load, batch), the cells of policy off."""

    target: DeviceProfile
    drafter: DeviceProfile
    recording: Recording | None
    plain: Mapping[tuple[Load, int], CellResult]
    cells: Sequence[CellResult]
    simulated: Mapping[Cell, float]
    """Tokens a second of the emulated cells in the simulator."""


class LookaheadBench:
    """The cells of one run, once everything is started."""

    def __init__(
        self,
        pairs: Mapping[Load, Pair],
        recording: Recording | None,
        guesses: Mapping[Rates, Guess],
        settings: LookaheadSettings,
    ) -> None:
        self._pairs = pairs
        self._recording = recording
        self._guesses = guesses
        self._settings = settings

    async def run(
        self, wanted: Sequence[Cell], *, tell: Callable[[str], None]
    ) -> tuple[dict[tuple[Load, int], CellResult], list[CellResult]]:
        """Every cell once a round, plain decoding before the first that is compared with it."""
        plain: dict[tuple[Load, int], CellResult] = {}
        results: list[CellResult] = []
        in_turn: list[CellResult] = []
        for cell in wanted:
            key = (cell.load, cell.batch)
            if key not in plain:
                plain[key] = CellResult(plain_cell(cell.batch, cell.load), 0.0)
                in_turn.append(plain[key])
            results.append(CellResult(cell, self._acceptance(cell)))
            in_turn.append(results[-1])
        done, total = 0, self._settings.repeats * len(in_turn)
        for _ in range(self._settings.repeats):
            for result in in_turn:
                done += 1
                tell(f"{done} of {total}: {result.cell.name}")
                result.runs.append(await self._measure(result.cell))
        return plain, results

    def _acceptance(self, cell: Cell) -> float:
        if cell.acceptance is not None:
            return cell.acceptance
        assert self._recording is not None
        return self._recording.acceptance

    def simulate(
        self, wanted: Sequence[Cell], target: DeviceProfile, drafter: DeviceProfile
    ) -> dict[Cell, float]:
        """The same cells in the simulator, but for those of the demo pair."""
        recorded = self._recording.keys(VOCAB_SIZE) if self._recording is not None else None
        text = ReplayText(VOCAB_SIZE, recorded)
        return {
            cell: simulated_speed(
                cell, self._load(cell), self._guess(cell), text, target=target, drafter=drafter
            )
            for cell in wanted
            if cell.load != NATURAL
        }

    def _guess(self, cell: Cell) -> Guess:
        return self._guesses.get((cell.acceptance, cell.hit_rate), AS_IT_DOES)

    async def _measure(self, cell: Cell) -> CellRun:
        pair, load = self._pairs[cell.load], self._load(cell)
        return await measure_cell(pair, cell, load, self._guess(cell))

    def _load(self, cell: Cell) -> list[LoadRequest]:
        tokens = self._settings.max_tokens if cell.batch == 1 else BATCHED_TOKENS
        if cell.load == "set":
            return set_load(cell.batch, tokens)
        assert self._recording is not None
        return recorded_load(self._recording, tokens, folded=cell.load != NATURAL)


def run_lookahead(
    settings: LookaheadSettings, *, home: Path, tell: Callable[[str], None]
) -> LookaheadResult:
    """Start the pairs, measure, end them."""
    target = load_profile(TARGET_PROFILE, role="target")
    drafter = load_profile(DRAFTER_PROFILE, role="drafter")
    wanted = cells(target, drafter, quick=settings.quick, parts=settings.parts)
    loads = {cell.load for cell in wanted}
    recording = demo_recording(home, tell=tell) if loads - {"set"} else None
    tell("choosing luck that is that of the long run")
    guesses = _guesses(wanted, settings.max_tokens)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        tell("starting the workers")
        pairs: dict[Load, Pair] = {}
        replayed = [cell for cell in wanted if cell.load != NATURAL]
        if replayed:
            layout = PairLayout(
                TARGET_PROFILE,
                DRAFTER_PROFILE,
                max(cell.num_drafters for cell in replayed),
                tuple(rtt for rtt in RTTS_MS if any(cell.rtt_ms == rtt for cell in replayed)),
                (*guesses.values(), AS_IT_DOES),
                recording_path(home) if "recorded" in loads else None,
            )
            stand_in = make_stand_in(Path(scratch) / "stand-in")
            pair = stack.enter_context(EmulatedPair(layout, stand_in, Path(scratch)))
            pairs |= {"set": pair, "recorded": pair}
        if NATURAL in loads:
            target_files = resolve_model("demo", home=home)
            drafter_files = resolve_model("demo-draft", home=home)
            natural = NaturalPair(target_files, drafter_files, Path(scratch))
            pairs[NATURAL] = stack.enter_context(natural)
        bench = LookaheadBench(pairs, recording, guesses, settings)
        plain, results = asyncio.run(bench.run(wanted, tell=tell))
    tell("simulating the same cells")
    everything = [one.cell for one in (*plain.values(), *results)]
    simulated = bench.simulate(everything, target, drafter)
    return LookaheadResult(target, drafter, recording, plain, results, simulated)


def _guesses(wanted: Sequence[Cell], max_tokens: int) -> dict[Rates, Guess]:
    """How drafters guess, by the cells' rates where they are set. The luck is that of one seed."""
    found: dict[Rates, Guess] = {}
    load = set_load(1, max_tokens)
    for acceptance in ACCEPTANCES:
        hit_rates = {cell.hit_rate for cell in wanted if cell.acceptance == acceptance}
        if not hit_rates:
            continue
        seed = pinned_guess(acceptance, HIT_RATES[0], load).seed
        for hit_rate in sorted(hit_rates, key=lambda rate: rate or 0.0):
            found[acceptance, hit_rate] = Guess(acceptance, hit_rate or 0.0, seed)
    return found


def plain_of(result: LookaheadResult, one: CellResult) -> CellResult:
    """Plain decoding of the same load; of itself, if it is that."""
    return result.plain[one.cell.load, one.cell.batch]


def same_text(result: LookaheadResult, one: CellResult) -> bool:
    """Whether every run gave the tokens of the first run of plain decoding."""
    texts = plain_of(result, one).runs[0].texts
    return all(run.texts == texts for run in one.runs)


def num_gpus(result: LookaheadResult, cell: Cell) -> int:
    """What a cell's devices are in GPUs; the demo pair's cores are counted as such."""
    if cell.load == NATURAL:
        return 1 if cell.policy is PolicyName.OFF else 2
    drafters = 0 if cell.policy is PolicyName.OFF else cell.num_drafters
    return result.target.gpus + drafters * result.drafter.gpus

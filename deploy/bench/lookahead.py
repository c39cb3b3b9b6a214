"""`paceline bench lookahead`: policies on an emulated 70B pair, over real gRPC and the real driver.

Emulated workers are processes that replay (workers/emulated); the driver runs in this one. Plain
decoding is measured in the same run, and every cell's text must equal its. The demo pair, which
computes, is measured beside them on real processor time, and in slow motion at the pace of those
devices (dilated). What has been measured is saved after each cell.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

from deploy.bench.lookahead_cells import (
    ACCEPTANCES,
    COMPUTED,
    DILATED,
    DILATED_RTTS_MS,
    DILATION,
    HIT_RATES,
    NATURAL,
    RTTS_MS,
    Cell,
    Load,
    cells,
    plain_cell,
)
from deploy.bench.lookahead_load import (
    LoadRequest,
    first_of_each,
    pinned_guess,
    recorded_load,
    set_load,
)
from deploy.bench.lookahead_measure import CellRun, measure_cell
from deploy.bench.lookahead_pairs import (
    DilatedPair,
    EmulatedPair,
    NaturalPair,
    Pair,
    PairLayout,
)
from deploy.bench.lookahead_results import CellResult, LookaheadResult, Measured, Save, result_of
from deploy.bench.lookahead_simulated import simulated_speed
from deploy.bench.record_replay import demo_recording, recording_path
from deploy.bench.time_sharing import time_sharing
from paceline.errors import PacelineError
from workers.emulated.profiles import DeviceProfile, load_profile
from workers.emulated.recording import Recording
from workers.emulated.replay_text import Guess, ReplayText
from workers.emulated.stand_in import VOCAB_SIZE, make_stand_in
from workers.models import ModelFiles, resolve_model

TARGET_PROFILE = "70b-4xh100"
DRAFTER_PROFILE = "1b-h100"
DILATED_TOKENS, DILATED_REQUESTS = 32, 2
"""In slow motion: most tokens a request, and requests at each temperature."""
AS_IT_DOES = Guess(None, None)
"""As recorded, or as a drafter that computes does."""

Rates = tuple[float | None, float | None]
"""The acceptance and hit rate of a cell."""


@dataclass(frozen=True, slots=True)
class LookaheadSettings:
    """How much is measured.

    `max_tokens`: a request, `batched_tokens` where many are decoded at once, `natural_tokens` where
    the demo pair takes real processor time; `repeats`: rounds over all cells; `parts`: of
    lookahead_cells, or all. `most_seconds`: no round but the first is begun that would end later.
    """

    max_tokens: int
    repeats: int
    quick: bool
    parts: tuple[str, ...] = ()
    most_seconds: float = math.inf
    batched_tokens: int = 64
    natural_tokens: int = 64


FULL = LookaheadSettings(240, 2, quick=False, most_seconds=18 * 60)
QUICK = LookaheadSettings(200, 1, quick=True)


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
        self,
        wanted: Sequence[Cell],
        *,
        tell: Callable[[str], None],
        save: Callable[[Measured], None],
    ) -> Measured:
        """Every cell once a round, plain decoding before the first that is compared with it.

        Those in slow motion take long and are measured in the first round alone. A round that
        is not over in time does not count. A cell that fails does not end the others. `save`
        hears of all after each.
        """
        measured = Measured(self._in_order(wanted))
        repeated = [one for one in measured.cells if one.cell.load != DILATED]
        took: dict[Cell, float] = {}
        began = time.monotonic()
        for number in range(self._settings.repeats):
            in_turn = repeated if number else measured.cells
            until = time.monotonic() - began + sum(took.get(one.cell, 0.0) for one in repeated)
            if number and until > self._settings.most_seconds:
                tell(f"{until / 60:.0f} minutes would be over after another round: it is left out")
                break
            for place, result in enumerate(in_turn, start=1):
                seconds = time.monotonic() - began
                if number and seconds > self._settings.most_seconds:
                    tell(f"{seconds / 60:.0f} minutes are over: this round does not count")
                    return measured
                of_round = f"{place} of {len(in_turn)} in round {number + 1}"
                tell(f"{of_round}, after {seconds:.0f} s: {result.cell.name}")
                try:
                    result.runs[number] = await self._measure(result.cell)
                except PacelineError as error:
                    result.errors.append(str(error))
                    tell(f"{result.cell.name} failed: {error}")
                took[result.cell] = time.monotonic() - began - seconds
                save(measured)
            measured.rounds = number + 1
        return measured

    def _in_order(self, wanted: Sequence[Cell]) -> list[CellResult]:
        results: list[CellResult] = []
        for cell in wanted:
            plain = plain_cell(cell.batch, cell.load)
            if all(one.cell != plain for one in results):
                results.append(CellResult(plain, 0.0))
            results.append(CellResult(cell, self._acceptance(cell)))
        return results

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
            if cell.load not in COMPUTED
        }

    def _guess(self, cell: Cell) -> Guess:
        return self._guesses.get((cell.acceptance, cell.hit_rate), AS_IT_DOES)

    async def _measure(self, cell: Cell) -> CellRun:
        pair, load = self._pairs[cell.load], self._load(cell)
        with time_sharing() if cell.load == NATURAL else nullcontext():
            return await measure_cell(pair, cell, load, self._guess(cell))

    def _load(self, cell: Cell) -> list[LoadRequest]:
        tokens = self._settings.max_tokens if cell.batch == 1 else self._settings.batched_tokens
        if cell.load == "set":
            return set_load(cell.batch, tokens)
        assert self._recording is not None
        if cell.load == DILATED:
            load = recorded_load(self._recording, min(tokens, DILATED_TOKENS), folded=False)
            return first_of_each(load, DILATED_REQUESTS)
        if cell.load == NATURAL:
            tokens = min(tokens, self._settings.natural_tokens)
        return recorded_load(self._recording, tokens, folded=cell.load not in COMPUTED)


def run_lookahead(
    settings: LookaheadSettings,
    *,
    home: Path,
    tell: Callable[[str], None],
    save: Save = lambda result: None,
) -> LookaheadResult:
    """Start the pairs, measure, end them. `save` is given what there is after each cell."""
    target = load_profile(TARGET_PROFILE, role="target")
    drafter = load_profile(DRAFTER_PROFILE, role="drafter")
    wanted = cells(target, drafter, quick=settings.quick, parts=settings.parts)
    recording = None
    if any(cell.load != "set" for cell in wanted):
        recording = demo_recording(home, tell=tell)
    tell("choosing luck that is that of the long run")
    guesses = guesses_of(wanted, settings.max_tokens)

    def result(
        measured: Measured,
        simulated: Mapping[Cell, float] | None = None,
    ) -> LookaheadResult:
        return result_of(measured, target, drafter, recording, simulated)

    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        tell("starting the workers")
        pairs = _start(wanted, guesses, stack, home=home, scratch=Path(scratch))
        bench = LookaheadBench(pairs, recording, guesses, settings)
        measured = asyncio.run(bench.run(wanted, tell=tell, save=lambda some: save(result(some))))
    tell("simulating the same cells")
    simulated = bench.simulate([one.cell for one in measured.cells if one.runs], target, drafter)
    return result(measured, simulated)


def _start(
    wanted: Sequence[Cell],
    guesses: Mapping[Rates, Guess],
    stack: ExitStack,
    *,
    home: Path,
    scratch: Path,
) -> dict[Load, Pair]:
    """The pairs that the cells need, until the stack is closed."""
    pairs: dict[Load, Pair] = {}
    loads = {cell.load for cell in wanted}
    replayed = [cell for cell in wanted if cell.load not in COMPUTED]
    if replayed:
        layout = PairLayout(
            TARGET_PROFILE,
            DRAFTER_PROFILE,
            max(cell.num_drafters for cell in replayed),
            tuple(rtt for rtt in RTTS_MS if any(cell.rtt_ms == rtt for cell in replayed)),
            (*guesses.values(), AS_IT_DOES),
            recording_path(home) if "recorded" in loads else None,
            max(cell.num_targets for cell in replayed),
        )
        stand_in = make_stand_in(scratch / "stand-in")
        pair = stack.enter_context(EmulatedPair(layout, stand_in, scratch))
        pairs |= {"set": pair, "recorded": pair}
    if NATURAL in loads:
        pairs[NATURAL] = stack.enter_context(NaturalPair(*_demo_files(home), scratch))
    if DILATED in loads:
        layout = PairLayout(TARGET_PROFILE, DRAFTER_PROFILE, 1, DILATED_RTTS_MS, (), None)
        slow = DilatedPair(layout, DILATION, *_demo_files(home), scratch)
        pairs[DILATED] = stack.enter_context(slow)
    return pairs


def _demo_files(home: Path) -> tuple[ModelFiles, ModelFiles]:
    return resolve_model("demo", home=home), resolve_model("demo-draft", home=home)


def guesses_of(wanted: Sequence[Cell], max_tokens: int) -> dict[Rates, Guess]:
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

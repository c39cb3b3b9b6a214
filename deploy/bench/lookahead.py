"""`paceline bench lookahead`: policies on an emulated 70B pair, over real gRPC and the real driver.

Emulated workers are processes that replay (workers/emulated); the driver runs in this one. Plain
decoding is measured in the same run, and every cell must give the same text. The results are saved
after each cell.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cluster.simulation import closed_forms
from deploy.bench.harness import Asked, Document, Report, Suite, register, table
from deploy.bench.lookahead_cells import (
    ACCEPTANCES,
    HIT_RATES,
    PARALLEL,
    RTTS_MS,
    Cell,
    Load,
    LoadRequest,
    cells,
    part_names,
    pinned_guess,
    plain_cell,
    set_load,
)
from deploy.bench.lookahead_pairs import (
    CellRun,
    EmulatedPair,
    PairLayout,
    measure_cell,
    simulated_speed,
)
from deploy.terminal.lines import whole_table
from paceline.errors import PacelineError
from workers.emulated.profiles import DeviceProfile, load_profile
from workers.emulated.replay_text import Guess, ReplayText
from workers.models.stand_in import VOCAB_SIZE, make_stand_in

TARGET_PROFILE = "70b-4xh100"
DRAFTER_PROFILE, PARALLEL_PROFILE = "1b-h100", "pard-1b-h100"
NO_GUESS = Guess(0.0, 0.0)
"""For plain decoding, which has no drafter."""

Rates = tuple[float | None, float | None]
"""The acceptance and hit rate of a cell."""

LEGEND = """
EMULATED: devices replay, with the latency profiles {target} and {drafter}. Rows "parallel": the
drafter is {parallel}.
/GPU: tokens/s a GPU; "!": faster than another row of the same load and link, but worse a GPU.
/off: tokens/s over plain decoding in the same round, the median of {rounds}. theory: the closed
form of the policy, without the driver's own time. ideal: every outcome foreseen.
eff: /off over ideal. gap: median ms between two passes of the target with work at hand.
idle: target, drafter. sim: tokens/s of the same cell in the simulator, over what was measured.
spread: of the repeats. same: the tokens of off, at T = 0 and T = 1.
"""
_WIDTH_OF_A_FILE = 150


@dataclass(frozen=True, slots=True)
class LookaheadSettings:
    """How much to measure.

    Tokens of a request: `max_tokens`, or `batched_tokens` if many are decoded at once. `repeats`:
    rounds over all cells. `parts`: some of `part_names`, or all. `most_seconds`: after the first
    round, no round begins that would end later.
    """

    max_tokens: int
    repeats: int
    quick: bool
    parts: tuple[str, ...] = ()
    most_seconds: float = math.inf
    batched_tokens: int = 64


FULL = LookaheadSettings(240, 2, quick=False, most_seconds=18 * 60)
QUICK = LookaheadSettings(200, 1, quick=True)


# What was measured


@dataclass(slots=True)
class CellResult:
    """A cell and its runs by round. The run with the median speed represents it."""

    cell: Cell
    acceptance: float
    runs: dict[int, CellRun] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    @property
    def median(self) -> CellRun:
        """The run with the median speed; of an even number, the lower of the two in the middle."""
        middle = statistics.median_low(run.tokens_per_second for run in self.runs.values())
        return next(run for run in self.runs.values() if run.tokens_per_second == middle)

    @property
    def speed(self) -> float:
        """Median tokens/s of the rounds."""
        return statistics.median(run.tokens_per_second for run in self.runs.values())

    @property
    def spread(self) -> float:
        """(fastest - slowest) / median."""
        speeds = [run.tokens_per_second for run in self.runs.values()]
        return (max(speeds) - min(speeds)) / self.speed


@dataclass(slots=True)
class Measured:
    """The cells that a run has measured, and the number of `rounds` that count.

    The first round counts from its begin, and a later one once it is complete.
    """

    cells: list[CellResult]
    rounds: int = 1

    @property
    def counted(self) -> list[CellResult]:
        """The cells, with only the runs of rounds that count.

        A machine is faster in some rounds than in others. If an incomplete round counted, the
        median of some cells would come from other rounds than the median of plain decoding.
        """
        return [
            replace(one, runs={key: run for key, run in one.runs.items() if key < self.rounds})
            for one in self.cells
        ]


@dataclass(frozen=True, slots=True)
class LookaheadResult:
    """Everything that was measured. `plain`: the cells of policy off, by (load, batch).

    Cells whose runs failed are in `failed`. `is_whole`: nothing more will be measured. `rounds`:
    the number of rounds that count.
    """

    target: DeviceProfile
    drafter: DeviceProfile
    plain: Mapping[tuple[Load, int], CellResult]
    cells: Sequence[CellResult]
    simulated: Mapping[Cell, float]
    """Tokens/s of the cells in the simulator."""
    failed: Sequence[CellResult] = ()
    is_whole: bool = True
    rounds: int = 1


Save = Callable[[LookaheadResult], None]
"""Saves a result, to which later cells may be added."""


def result_of(
    measured: Measured,
    target: DeviceProfile,
    drafter: DeviceProfile,
    simulated: Mapping[Cell, float] | None,
) -> LookaheadResult:
    """The cells that are measured. `simulated`: None until all are."""
    counted = measured.counted
    plain = {
        (one.cell.load, one.cell.batch): one for one in counted if one.runs and not one.cell.drafts
    }
    compared = [
        one
        for one in counted
        if one.runs and one.cell.drafts
        if (one.cell.load, one.cell.batch) in plain
    ]
    failed = [one for one in counted if one.errors]
    return LookaheadResult(
        target,
        drafter,
        plain,
        compared,
        simulated or {},
        failed,
        is_whole=simulated is not None,
        rounds=measured.rounds,
    )


def plain_of(result: LookaheadResult, one: CellResult) -> CellResult:
    """The cell of plain decoding with the same load, which may be the cell itself."""
    return result.plain[one.cell.load, one.cell.batch]


def speedup(result: LookaheadResult, one: CellResult) -> float:
    """Tokens/s over those of plain decoding in the same round; the median over the rounds."""
    plain = plain_of(result, one)
    shared = one.runs.keys() & plain.runs.keys()
    if not shared:  # one of them failed in each round
        return one.median.tokens_per_second / plain.median.tokens_per_second
    return statistics.median(
        one.runs[key].tokens_per_second / plain.runs[key].tokens_per_second for key in shared
    )


def same_text(result: LookaheadResult, one: CellResult) -> bool:
    """Whether every run gave the tokens of the first run of plain decoding."""
    texts = next(iter(plain_of(result, one).runs.values())).texts
    return all(run.texts == texts for run in one.runs.values())


def drafter_of(result: LookaheadResult, cell: Cell) -> DeviceProfile:
    """The profile of a cell's drafters."""
    if cell.load == PARALLEL:
        return load_profile(PARALLEL_PROFILE, role="drafter")
    return result.drafter


def num_gpus(result: LookaheadResult, cell: Cell) -> int:
    """GPUs of a cell's devices."""
    drafters = cell.num_drafters if cell.drafts else 0
    return cell.num_targets * result.target.gpus + drafters * drafter_of(result, cell).gpus


# Measuring


class LookaheadBench:
    """The cells of one run, once everything is started."""

    def __init__(
        self,
        pairs: Mapping[Load, EmulatedPair],
        guesses: Mapping[Rates, Guess],
        settings: LookaheadSettings,
    ) -> None:
        self._pairs = pairs
        self._guesses = guesses
        self._settings = settings

    async def run(
        self,
        wanted: Sequence[Cell],
        *,
        tell: Callable[[str], None],
        save: Callable[[Measured], None],
    ) -> Measured:
        """Measure every cell once per round. Plain decoding precedes the cells compared with it.

        A round that does not end in time does not count. If a cell fails, the others go on. `save`
        gets all results after each cell.
        """
        measured = Measured(self._in_order(wanted))
        took: dict[Cell, float] = {}
        began = time.monotonic()
        for number in range(self._settings.repeats):
            until = (
                time.monotonic() - began + sum(took.get(one.cell, 0.0) for one in measured.cells)
            )
            if number and until > self._settings.most_seconds:
                tell(f"{until / 60:.0f} minutes would be over after another round: it is left out")
                break
            for place, result in enumerate(measured.cells, start=1):
                seconds = time.monotonic() - began
                if number and seconds > self._settings.most_seconds:
                    tell(f"{seconds / 60:.0f} minutes are over: this round does not count")
                    return measured
                of_round = f"{place} of {len(measured.cells)} in round {number + 1}"
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
            results.append(CellResult(cell, cell.acceptance or 0.0))
        return results

    def simulate(
        self, wanted: Sequence[Cell], target: DeviceProfile, drafter: DeviceProfile
    ) -> dict[Cell, float]:
        """Tokens/s of the cells in the simulator."""
        text = ReplayText(VOCAB_SIZE)
        parallel = load_profile(PARALLEL_PROFILE, role="drafter")
        return {
            cell: simulated_speed(
                cell,
                self._load(cell),
                self._guess(cell),
                text,
                target=target,
                drafter=parallel if cell.load == PARALLEL else drafter,
            )
            for cell in wanted
        }

    def _guess(self, cell: Cell) -> Guess:
        return self._guesses.get((cell.acceptance, cell.hit_rate), NO_GUESS)

    async def _measure(self, cell: Cell) -> CellRun:
        return await measure_cell(self._pairs[cell.load], cell, self._load(cell), self._guess(cell))

    def _load(self, cell: Cell) -> list[LoadRequest]:
        tokens = self._settings.max_tokens if cell.batch == 1 else self._settings.batched_tokens
        return set_load(cell.batch, tokens)


def run_lookahead(
    settings: LookaheadSettings,
    *,
    tell: Callable[[str], None],
    save: Save = lambda result: None,
) -> LookaheadResult:
    """Start the pairs, measure, end them. After each cell, `save` gets all measured cells."""
    target = load_profile(TARGET_PROFILE, role="target")
    drafter = load_profile(DRAFTER_PROFILE, role="drafter")
    wanted = cells(target, drafter, quick=settings.quick, parts=settings.parts)
    tell("choosing a seed whose luck is that of the long run")
    guesses = guesses_of(wanted, settings.max_tokens)

    def result(
        measured: Measured,
        simulated: Mapping[Cell, float] | None = None,
    ) -> LookaheadResult:
        return result_of(measured, target, drafter, simulated)

    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        tell("starting the workers")
        pairs = _start(wanted, guesses, stack, Path(scratch))
        bench = LookaheadBench(pairs, guesses, settings)
        measured = asyncio.run(bench.run(wanted, tell=tell, save=lambda some: save(result(some))))
    tell("simulating the same cells")
    simulated = bench.simulate([one.cell for one in measured.cells if one.runs], target, drafter)
    return result(measured, simulated)


def _start(
    wanted: Sequence[Cell], guesses: Mapping[Rates, Guess], stack: ExitStack, scratch: Path
) -> dict[Load, EmulatedPair]:
    """Start the pairs that the cells need. Closing the stack ends them."""
    pairs: dict[Load, EmulatedPair] = {}
    profiles: Sequence[tuple[Load, str]] = (("set", DRAFTER_PROFILE), (PARALLEL, PARALLEL_PROFILE))
    for load, profile in profiles:
        replayed = [cell for cell in wanted if cell.load == load]
        if not replayed:
            continue
        layout = PairLayout(
            TARGET_PROFILE,
            profile,
            max(cell.num_drafters for cell in replayed),
            tuple(rtt for rtt in RTTS_MS if any(cell.rtt_ms == rtt for cell in replayed)),
            tuple(guesses.values()),
            max(cell.num_targets for cell in replayed),
        )
        logs = scratch / profile
        logs.mkdir()
        stand_in = make_stand_in(logs / "stand-in")
        pairs[load] = stack.enter_context(EmulatedPair(layout, stand_in, logs))
    return pairs


def guesses_of(wanted: Sequence[Cell], max_tokens: int) -> dict[Rates, Guess]:
    """How drafters guess, by the acceptance and hit rate that cells set, all with the same seed."""
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


# Report


def lookahead_json(result: LookaheadResult, machine: Mapping[str, object]) -> dict[str, object]:
    """The document of `bench lookahead --json`."""
    document: dict[str, object] = {
        "suite": "lookahead",
        "machine": machine,
        "emulated": True,
        "complete": result.is_whole,
        "rounds": result.rounds,
        "profiles": {
            role: {"name": profile.name, "source": profile.source.strip()}
            for role, profile in (
                ("target", result.target),
                ("drafter", result.drafter),
                (PARALLEL, load_profile(PARALLEL_PROFILE)),
            )
        },
        "rows": _rows(result),
    }
    if result.failed:
        document["failed"] = {one.cell.name: one.errors for one in result.failed}
    return document


def print_lookahead(console: Console, result: LookaheadResult) -> None:
    """Print a row for each cell. A file gets all columns, a narrow terminal those that fit."""
    if not console.is_terminal:
        console = Console(file=console.file, width=_WIDTH_OF_A_FILE)
    headings = (
        "",
        "rtt",
        "accept",
        "hits",
        "batch",
        "tok/s",
        "/GPU",
        "/off",
        "theory",
        "ideal",
        "eff",
    )
    shown = table((*headings, "len", "idle", "gap", "sim", "spread", "same"))
    for row in _rows(result):
        _add_row(shown, row)
    whole_table(console, shown, optional=("sim", "spread", "theory", "ideal", "gap", "hits", "rtt"))
    legend = LEGEND.format(
        target=result.target.name,
        drafter=result.drafter.name,
        parallel=PARALLEL_PROFILE,
        rounds="1 round" if result.rounds == 1 else f"{result.rounds} whole rounds",
    )
    console.print(legend, highlight=False)
    for one in result.failed:
        console.print(f"{one.cell.name} failed: {'; '.join(one.errors)}", highlight=False)
    late = {one.cell.name: one.median.overruns for one in result.cells if one.median.overruns}
    if late:
        console.print(
            "this machine was too slow for passes of "
            + ", ".join(f"{name} ({count})" for name, count in late.items()),
            highlight=False,
        )


def _rows(result: LookaheadResult) -> list[dict[str, object]]:
    """The rows of all cells, with a mark on layouts that are faster but worse per GPU."""
    cells = [*result.plain.values(), *result.cells]
    rows = [_row(result, one) for one in cells]
    for one, row in zip(cells, rows, strict=True):
        row["faster_but_worse_per_gpu"] = any(
            _is_alike(one, other)
            and other.median.tokens_per_second < one.median.tokens_per_second
            and _per_gpu(result, other) > _per_gpu(result, one)
            for other in cells
        )
    return rows


def _is_alike(one: CellResult, other: CellResult) -> bool:
    """Whether two cells have the same load and the same link. Plain decoding has no link."""
    if (one.cell.load, one.cell.batch) != (other.cell.load, other.cell.batch):
        return False
    if not other.cell.drafts:
        return True
    conditions = [(cell.rtt_ms, cell.acceptance) for cell in (one.cell, other.cell)]
    return conditions[0] == conditions[1]


def _per_gpu(result: LookaheadResult, one: CellResult) -> float:
    return one.median.tokens_per_second / num_gpus(result, one.cell)


def _row(result: LookaheadResult, one: CellResult) -> dict[str, object]:
    cell, run = one.cell, one.median
    off = not cell.drafts
    gain = speedup(result, one)
    ideal = None if off else _ideal(result, one)
    simulated = result.simulated.get(cell)
    return {
        "name": cell.name,
        "policy": cell.policy,
        "emulated": True,
        "parallel": cell.load == PARALLEL,
        "rtt_ms": None if off else cell.rtt_ms,
        "acceptance": None if off else one.acceptance,
        "hit_rate": cell.hit_rate,
        "batch": cell.batch,
        "window": cell.window,
        "branches": cell.branches,
        "drafters": 0 if off else cell.num_drafters,
        "target_groups": cell.num_targets,
        "speedup": gain,
        "tokens_per_second": run.tokens_per_second,
        "tokens_per_second_per_gpu": _per_gpu(result, one),
        "gpus": num_gpus(result, cell),
        "acceptance_length": run.acceptance_length,
        "target_idle": run.target_idle,
        "drafter_idle": run.drafter_idle,
        "target_gap_ms": run.gap_ms,
        "step_ms": run.step_ms,
        "draft_ms": run.draft_ms,
        "overruns": run.overruns,
        "theory": None if off else _theory(result, one),
        "ideal": ideal,
        "efficiency": None if ideal is None else gain / ideal,
        "simulated_tokens_per_second": simulated,
        "simulated_over_measured": None if simulated is None else simulated / one.speed,
        "spread": one.spread,
        "repeats": len(one.runs),
        "same_text": same_text(result, one),
    }


def _times(result: LookaheadResult, one: CellResult) -> dict[str, float]:
    """Time of a step of plain decoding and of a drafted token."""
    batch, drafter = one.cell.batch, drafter_of(result, one.cell)
    return {
        "step_ms": result.target.pass_ms.ms(batch, batch * (1 + one.cell.window)),
        "draft_ms": drafter.pass_ms.ms(batch, batch) / drafter.tokens_a_pass,
    }


def _ideal(result: LookaheadResult, one: CellResult) -> float:
    return closed_forms.ideal_overlap(one.acceptance, **_times(result, one))


def _theory(result: LookaheadResult, one: CellResult) -> float | None:
    """The speed-up by the policy's closed form; None: it has none."""
    cell, times = one.cell, _times(result, one)
    if cell.policy == "lockstep":
        return closed_forms.lockstep(one.acceptance, cell.window, **times, rtt_ms=cell.rtt_ms)
    if cell.policy == "pearl":
        return closed_forms.pearl(one.acceptance, **times)
    return None


def _add_row(shown: Table, row: Mapping[str, object]) -> None:
    idle = [row["target_idle"], row["drafter_idle"]]
    shown.add_row(
        _label(row),
        _number(row["rtt_ms"], "g"),
        _number(row["acceptance"], ".2f"),
        _number(row["hit_rate"], ".2f"),
        str(row["batch"]),
        _number(row["tokens_per_second"], ".1f"),
        _number(row["tokens_per_second_per_gpu"], ".1f")
        + ("!" if row["faster_but_worse_per_gpu"] else ""),
        _number(row["speedup"], ".2f"),
        _number(row["theory"], ".2f"),
        _number(row["ideal"], ".2f"),
        _number(row["efficiency"], ".0%"),
        _number(row["acceptance_length"], ".2f"),
        " ".join(_number(share, ".0%") for share in idle if share is not None),
        _number(row["target_gap_ms"], ".2f"),
        _number(row["simulated_over_measured"], ".2f"),
        _number(row["spread"], ".1%"),
        "yes" if row["same_text"] else "no",
    )


def _label(row: Mapping[str, object]) -> str:
    tree = "" if row["branches"] == 1 else f" tree {row['window']}"
    kind = " parallel" if row["parallel"] else ""
    return f"{row['policy']}{tree}{kind}"


def _number(value: object, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else ""


def _run(asked: Asked) -> Report:
    usual = QUICK if asked.quick else FULL
    settings = replace(
        usual,
        max_tokens=asked.max_tokens or usual.max_tokens,
        repeats=asked.repeats or usual.repeats,
        parts=tuple(asked.part or ()),
    )

    def written(result: LookaheadResult) -> Document:
        return lookahead_json(result, asked.machine)

    result = run_lookahead(
        settings,
        tell=asked.tell,
        save=lambda result: asked.save(written(result)),
    )
    return Report(written(result), lambda console: print_lookahead(console, result))


register(
    Suite(
        "lookahead",
        "policies on an emulated 70B pair, theory beside them; by default 240 tokens a "
        "request and 2 rounds (20 minutes; --quick: 2). A part is a policy, or parallel (a drafter "
        "of that kind)",
        _run,
        frozenset({"max_tokens", "repeats", "part", "quick"}),
        parts=part_names(),
    )
)

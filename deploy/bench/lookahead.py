"""`paceline bench lookahead`: policies on an emulated 70B pair, over real gRPC and the real driver.

Emulated workers are processes that replay (workers/emulated); the driver runs in this one. Plain
decoding is measured in the same run, and every cell must give the same text. The results are saved
after each cell.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from rich.console import Console

from cluster.decoding.policies.fanout import FANOUT
from cluster.simulation.closed_forms import ideal_overlap
from deploy.bench.harness import Asked, Document, Row, Suite, figure, register, table
from deploy.bench.lookahead_cells import (
    PARALLEL,
    Cell,
    CellRun,
    EmulatedPair,
    cells,
    measure_cell,
    pair_for,
    part_names,
    plain_cell,
    requests_of,
)
from deploy.terminal.lines import whole_table
from paceline.errors import PacelineError
from paceline.v1 import trace_pb2
from workers.emulated.latency_profiles import DeviceProfile, load_profile

TARGET_PROFILE = "70b-4xh100"
DRAFTER_PROFILE, PARALLEL_PROFILE = "1b-h100", "pard-1b-h100"
DRAFTER_PROFILES = {False: DRAFTER_PROFILE, True: PARALLEL_PROFILE}
"""By whether the drafter is parallel."""

LEGEND = """
EMULATED: devices replay, with the latency profiles {target} and {drafter}. Rows "parallel": the
drafter is {parallel}.
/GPU: tokens/s a GPU; "!": faster than another row of the same load and link, but worse a GPU.
/off: tokens/s over plain decoding in the same round, the median of {rounds}. ideal: every outcome
foreseen. eff: /off over ideal. gap: median ms between two passes of the target with work at hand.
idle: target, drafter. spread: of the repeats. same: the tokens of off, at T = 0 and T = 1.
"""
_COLUMNS = (
    ("", "shown", ""),
    ("rtt", "rtt_ms", "g"),
    ("accept", "acceptance", ".2f"),
    ("hits", "hit_rate", ".2f"),
    ("batch", "batch", "d"),
    ("tok/s", "tokens_per_second", ".1f"),
    ("/GPU", "per_gpu", ""),
    ("/off", "speedup", ".2f"),
    ("ideal", "ideal", ".2f"),
    ("eff", "efficiency", ".0%"),
    ("len", "acceptance_length", ".2f"),
    ("gap", "target_gap_ms", ".2f"),
    ("spread", "spread", ".1%"),
    ("idle", "idle", ".0%"),
    ("same", "same_text", ""),
)
MOST_SECONDS = 18 * 60
"""After the first round, no round begins that would end later than this."""
BATCHED_TOKENS = 64
"""Tokens of a request where many are decoded at once."""
_WIDTH_OF_A_FILE = 150


# What was measured


@dataclass(slots=True)
class CellResult:
    """A cell and its runs by round. The run with the median speed represents it."""

    cell: Cell
    runs: dict[int, CellRun] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    @property
    def median(self) -> CellRun:
        """The run with the median speed; of an even number, the lower of the two in the middle."""
        middle = statistics.median_low(run.tokens_per_second for run in self.runs.values())
        return next(run for run in self.runs.values() if run.tokens_per_second == middle)

    @property
    def spread(self) -> float:
        speeds = [run.tokens_per_second for run in self.runs.values()]
        return (max(speeds) - min(speeds)) / statistics.median(speeds)


@dataclass(slots=True)
class LookaheadResult:
    """The cells of a run, in the order in which they are measured.

    `rounds`: how many count. The first round counts from its begin, and a later one once it is
    complete. `is_whole`: nothing more will be measured.
    """

    cells: list[CellResult]
    rounds: int = 1
    is_whole: bool = False

    @property
    def counted(self) -> list[CellResult]:
        """The cells that have runs in rounds that count, with only these runs.

        A machine is faster in some rounds than in others. If an incomplete round counted, the
        median of some cells would come from other rounds than the median of plain decoding.
        """
        counted = [
            replace(one, runs={key: run for key, run in one.runs.items() if key < self.rounds})
            for one in self.cells
        ]
        return [one for one in counted if one.runs]


def in_order(wanted: Sequence[Cell]) -> list[CellResult]:
    """The cells, plain decoding before the first cell that is compared with it."""
    results: list[CellResult] = []
    for cell in wanted:
        plain = plain_cell(cell.batch, parallel=cell.parallel)
        if all(one.cell != plain for one in results):
            results.append(CellResult(plain))
        results.append(CellResult(cell))
    return results


def speedup(one: CellResult, plain: CellResult) -> float:
    """Tokens/s over those of plain decoding in the same round; the median over the rounds."""
    shared = one.runs.keys() & plain.runs.keys()
    if not shared:  # one of them failed in each round
        return one.median.tokens_per_second / plain.median.tokens_per_second
    return statistics.median(
        one.runs[key].tokens_per_second / plain.runs[key].tokens_per_second for key in shared
    )


# Measuring


async def measure_cells(
    pairs: Mapping[bool, EmulatedPair],
    result: LookaheadResult,
    *,
    max_tokens: int,
    batched_tokens: int = BATCHED_TOKENS,
    repeats: int = 1,
    most_seconds: float = MOST_SECONDS,
    tell: Callable[[str], None],
    save: Callable[[], None] = lambda: None,
) -> None:
    """Measure every cell of `result` once per round, on the pair with or without `parallel`.

    A request has `max_tokens`, or `batched_tokens` if many are decoded at once. A round that does
    not end in time does not count. If a cell fails, the others go on. `save` is called after each
    cell.
    """
    took: dict[Cell, float] = {}
    began = time.monotonic()
    for number in range(repeats):
        until = time.monotonic() - began + sum(took.values())
        if number and until > most_seconds:
            tell(f"{until / 60:.0f} minutes would be over after another round: it is left out")
            return
        for place, one in enumerate(result.cells, start=1):
            seconds = time.monotonic() - began
            if number and seconds > most_seconds:
                tell(f"{seconds / 60:.0f} minutes are over: this round does not count")
                return
            of_round = f"{place} of {len(result.cells)} in round {number + 1}"
            tell(f"{of_round}, after {seconds:.0f} s: {one.cell.name}")
            tokens = max_tokens if one.cell.batch == 1 else batched_tokens
            load = requests_of(one.cell.batch, tokens)
            try:
                one.runs[number] = await measure_cell(pairs[one.cell.parallel], one.cell, load)
            except PacelineError as error:
                one.errors.append(str(error))
                tell(f"{one.cell.name} failed: {error}")
            took[one.cell] = time.monotonic() - began - seconds
            save()
        result.rounds = number + 1


def run_lookahead(asked: Asked) -> Document:
    """Start the pairs, measure and end them."""
    profiles = (load_profile(TARGET_PROFILE), load_profile(DRAFTER_PROFILE))
    wanted = cells(*profiles, quick=asked.quick, parts=asked.part or ())
    result = LookaheadResult(in_order(wanted))
    with ExitStack() as stack:
        asked.tell("starting the workers")
        pairs: dict[bool, EmulatedPair] = {}
        for parallel, profile in DRAFTER_PROFILES.items():
            if replayed := [cell for cell in wanted if cell.parallel == parallel]:
                pair = pair_for(TARGET_PROFILE, profile, replayed)
                pairs[parallel] = stack.enter_context(pair)
        measuring = measure_cells(
            pairs,
            result,
            max_tokens=asked.max_tokens,
            repeats=asked.repeats,
            most_seconds=math.inf if asked.quick else MOST_SECONDS,
            tell=asked.tell,
            save=lambda: asked.save(lookahead_document(result)),
        )
        asyncio.run(measuring)
    result.is_whole = True
    return lookahead_document(result)


@dataclass(frozen=True, slots=True)
class EmulatedGain:
    """Speeds in tokens/s of one sequence, on devices that replay latency profiles."""

    policy: str
    acceptance: float
    plain: float
    drafted: float
    target_gpus: int
    same_text: bool

    @property
    def times(self) -> float:
        return self.drafted / self.plain


async def emulated_gain(
    max_tokens: int = 160,
    *,
    tell: Callable[[str], None],
    on_round: Callable[[trace_pb2.TraceResponse], None],
) -> EmulatedGain:
    """A cell beside plain decoding, 11 s long. `on_round` gets the rounds of the cell."""
    target, drafter = load_profile(TARGET_PROFILE), load_profile(DRAFTER_PROFILE)
    (cell,) = cells(target, drafter, quick=True, parts=(FANOUT.name,))
    load = requests_of(1, max_tokens)
    tell("an emulated 70B: starting its processes")
    with pair_for(TARGET_PROFILE, DRAFTER_PROFILE, [cell]) as pair:
        tell("an emulated 70B: plain decoding")
        plain = await measure_cell(pair, plain_cell(1), load)
        tell(f"an emulated 70B: {cell.policy}")
        drafted = await measure_cell(pair, cell, load, on_round=on_round)
    return EmulatedGain(
        policy=cell.policy,
        acceptance=cell.acceptance or 0.0,
        plain=plain.tokens_per_second,
        drafted=drafted.tokens_per_second,
        target_gpus=target.gpus,
        same_text=plain.texts == drafted.texts,
    )


# Report


def lookahead_document(result: LookaheadResult) -> Document:
    names = {"target": TARGET_PROFILE, "drafter": DRAFTER_PROFILE, PARALLEL: PARALLEL_PROFILE}
    document: Document = {
        "emulated": True,
        "complete": result.is_whole,
        "rounds": result.rounds,
        "profiles": {
            role: {"name": name, "source": load_profile(name).source.strip()}
            for role, name in names.items()
        },
        "rows": _rows(result),
    }
    if failed := {one.cell.name: one.errors for one in result.cells if one.errors}:
        document["failed"] = failed
    return document


def show_lookahead(console: Console, document: Document) -> None:
    """Print a row for each cell. A file gets all columns, a narrow terminal those that fit."""
    if not console.is_terminal:
        console = Console(file=console.file, width=_WIDTH_OF_A_FILE)
    rows, rounds = document["rows"], document["rounds"]
    shown = table(_COLUMNS, map(_shown, rows))
    whole_table(console, shown, optional=("spread", "ideal", "gap", "hits", "rtt"))
    legend = LEGEND.format(
        target=TARGET_PROFILE,
        drafter=DRAFTER_PROFILE,
        parallel=PARALLEL_PROFILE,
        rounds="1 round" if rounds == 1 else f"{rounds} whole rounds",
    )
    console.print(legend, highlight=False)
    for name, errors in document.get("failed", {}).items():
        console.print(f"{name} failed: {'; '.join(errors)}", highlight=False)
    if late := [f"{row['name']} ({row['overruns']})" for row in rows if row["overruns"]]:
        console.print(f"this machine was too slow for passes of {', '.join(late)}", highlight=False)


def _shown(row: Row) -> Row:
    tree = "" if row["branches"] == 1 else f" tree {row['window']}"
    parallel = f" {PARALLEL}" if row["parallel"] else ""
    worse = "!" if row["faster_but_worse_per_gpu"] else ""
    return {
        **row,
        "shown": f"{row['policy']}{tree}{parallel}",
        "per_gpu": figure(row["tokens_per_second_per_gpu"], ".1f") + worse,
        "idle": {"target": row["target_idle"], "drafter": row["drafter_idle"]},
    }


def _rows(result: LookaheadResult) -> list[Row]:
    """The rows of all cells, with a mark on layouts that are faster but worse per GPU."""
    counted = result.counted
    plain = {(one.cell.parallel, one.cell.batch): one for one in counted if not one.cell.drafts}
    drafted = [
        one for one in counted if one.cell.drafts and (one.cell.parallel, one.cell.batch) in plain
    ]
    profiles = {
        parallel: (load_profile(TARGET_PROFILE), load_profile(drafter))
        for parallel, drafter in DRAFTER_PROFILES.items()
    }
    rows = [
        _row(one, plain[one.cell.parallel, one.cell.batch], *profiles[one.cell.parallel])
        for one in [*plain.values(), *drafted]
    ]
    speed, per_gpu = "tokens_per_second", "tokens_per_second_per_gpu"
    for row in rows:
        row["faster_but_worse_per_gpu"] = any(
            _is_alike(row, other) and other[speed] < row[speed] and other[per_gpu] > row[per_gpu]
            for other in rows
        )
    return rows


def _is_alike(row: Row, other: Row) -> bool:
    """Whether two rows have the same load and the same link. Plain decoding has no link."""
    of_load, of_link = ("parallel", "batch"), ("rtt_ms", "acceptance")
    return all(row[key] == other[key] for key in of_load) and (
        other["drafters"] == 0 or all(row[key] == other[key] for key in of_link)
    )


def _row(one: CellResult, plain: CellResult, target: DeviceProfile, drafter: DeviceProfile) -> Row:
    cell, run, gain = one.cell, one.median, speedup(one, plain)
    drafters = cell.num_drafters if cell.drafts else 0
    gpus = cell.num_targets * target.gpus + drafters * drafter.gpus
    ideal = None
    if cell.acceptance is not None:
        ideal = ideal_overlap(
            cell.acceptance,
            step_ms=target.pass_ms.ms(cell.batch, cell.batch * (1 + cell.window)),
            draft_ms=drafter.pass_ms.ms(cell.batch, cell.batch) / drafter.tokens_a_pass,
        )
    texts = next(iter(plain.runs.values())).texts
    return {
        "name": cell.name,
        "policy": cell.policy,
        "emulated": True,
        "parallel": cell.parallel,
        "rtt_ms": cell.rtt_ms if cell.drafts else None,
        "acceptance": cell.acceptance,
        "hit_rate": cell.hit_rate,
        "batch": cell.batch,
        "window": cell.window,
        "branches": cell.branches,
        "drafters": drafters,
        "target_groups": cell.num_targets,
        "speedup": gain,
        "tokens_per_second": run.tokens_per_second,
        "tokens_per_second_per_gpu": run.tokens_per_second / gpus,
        "gpus": gpus,
        "acceptance_length": run.acceptance_length,
        "target_idle": run.target_idle,
        "drafter_idle": run.drafter_idle,
        "target_gap_ms": run.gap_ms,
        "step_ms": run.step_ms,
        "draft_ms": run.draft_ms,
        "overruns": run.overruns,
        "ideal": ideal,
        "efficiency": None if ideal is None else gain / ideal,
        "spread": one.spread,
        "repeats": len(one.runs),
        "same_text": all(each.texts == texts for each in one.runs.values()),
    }


register(
    Suite(
        "lookahead",
        "policies on an emulated 70B pair; by default 240 tokens a request and 2 rounds (20 "
        "minutes; --quick: 2). A part is a policy, or parallel (a drafter of that kind)",
        run_lookahead,
        show_lookahead,
        {"max_tokens": (240, 200), "repeats": (2, 1)},
        parts=part_names(),
    )
)

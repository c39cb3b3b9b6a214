"""What `bench lookahead` has measured: cells, their runs, and plain decoding beside them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cluster.decoding.policies import PolicyName
from deploy.bench.lookahead_cells import NATURAL, Cell, Load
from deploy.bench.lookahead_measure import CellRun
from workers.emulated.profiles import DeviceProfile
from workers.emulated.recording import Recording


@dataclass(slots=True)
class CellResult:
    """A cell and its runs by round; the run whose speed is the median stands for it."""

    cell: Cell
    acceptance: float
    runs: dict[int, CellRun] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    @property
    def median(self) -> CellRun:
        """By speed; the lower of the two in the middle."""
        middle = statistics.median_low(run.tokens_per_second for run in self.runs.values())
        return next(run for run in self.runs.values() if run.tokens_per_second == middle)

    @property
    def speed(self) -> float:
        """Tokens/s in the middle of the rounds: of two, between them."""
        return statistics.median(run.tokens_per_second for run in self.runs.values())

    @property
    def spread(self) -> float:
        """(fastest - slowest) / median."""
        speeds = [run.tokens_per_second for run in self.runs.values()]
        return (max(speeds) - min(speeds)) / self.speed


@dataclass(slots=True)
class Measured:
    """What a run of the bench has so far. `rounds`: those that count, which is the first, and
    others once they are whole.
    """

    cells: list[CellResult]
    rounds: int = 1

    @property
    def counted(self) -> list[CellResult]:
        """The cells with the runs of rounds that count alone.

        A machine is faster in one round than in another. If some cells were in both and plain
        decoding too, what stands for it would be of another time than what stands for the rest.
        """
        return [
            replace(one, runs={key: run for key, run in one.runs.items() if key < self.rounds})
            for one in self.cells
        ]


@dataclass(frozen=True, slots=True)
class LookaheadResult:
    """All that was measured. `plain`: by (load, batch), the cells of policy off.

    Cells without a run are none of these: they are in `failed`, if they were tried. `is_whole`:
    nothing more will be measured. `rounds`: how many counted.
    """

    target: DeviceProfile
    drafter: DeviceProfile
    recording: Recording | None
    plain: Mapping[tuple[Load, int], CellResult]
    cells: Sequence[CellResult]
    simulated: Mapping[Cell, float]
    """Tokens a second of the replayed cells in the simulator."""
    failed: Sequence[CellResult] = ()
    is_whole: bool = True
    rounds: int = 1


Save = Callable[[LookaheadResult], None]
"""Takes what has been measured so far."""


def result_of(
    measured: Measured,
    target: DeviceProfile,
    drafter: DeviceProfile,
    recording: Recording | None,
    simulated: Mapping[Cell, float] | None,
) -> LookaheadResult:
    """What has been measured; `simulated` None: there is more to come."""
    counted = measured.counted
    plain = {
        (one.cell.load, one.cell.batch): one
        for one in counted
        if one.cell.policy is PolicyName.OFF and one.runs
    }
    compared = [
        one
        for one in counted
        if one.cell.policy is not PolicyName.OFF and one.runs
        if (one.cell.load, one.cell.batch) in plain
    ]
    failed = [one for one in counted if one.errors]
    return LookaheadResult(
        target,
        drafter,
        recording,
        plain,
        compared,
        simulated or {},
        failed,
        is_whole=simulated is not None,
        rounds=measured.rounds,
    )


def plain_of(result: LookaheadResult, one: CellResult) -> CellResult:
    """Plain decoding of the same load; of itself, if it is that."""
    return result.plain[one.cell.load, one.cell.batch]


def speedup(result: LookaheadResult, one: CellResult) -> float:
    """Tokens/s over those of plain decoding in the same round; of several rounds the median."""
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


def num_gpus(result: LookaheadResult, cell: Cell) -> int:
    """What a cell's devices are in GPUs; the demo pair's cores are counted as such."""
    if cell.load == NATURAL:
        return 1 if cell.policy is PolicyName.OFF else 2
    drafters = 0 if cell.policy is PolicyName.OFF else cell.num_drafters
    return cell.num_targets * result.target.gpus + drafters * result.drafter.gpus

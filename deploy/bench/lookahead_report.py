"""What `bench lookahead` measured: a table beside theory, a document for programs."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from cluster.decoding.policies import PolicyName
from cluster.simulation import closed_forms
from deploy.bench.lookahead_cells import DILATED, DILATION, HITS_BRANCHES, NATURAL
from deploy.bench.lookahead_results import (
    CellResult,
    LookaheadResult,
    num_gpus,
    plain_of,
    same_text,
    speedup,
)

LEGEND = """
EMULATED: devices replay, with the latency profiles {target} and {drafter}. Rows "dilated": the demo
pair computes, with all times {dilation:g} times those of the profiles, and told divided by it; also
what driver and gRPC take here. Rows "natural": the demo pair as fast as it computes, on a core each
(a core counts as a GPU).
/GPU: tokens/s a GPU; "!": faster than another row of the same load and link, but worse a GPU.
/off: tokens/s over plain decoding in the same round, the median of {rounds} (dilated
rows: of 1). theory: the closed form of the policy (ALGORITHMS.md section 5), without the driver's
own time. ideal: every outcome foreseen.
eff: /off over ideal. gap: median ms between two passes of the target with work at hand.
idle: target, drafter. sim: tokens/s of the same cell in the simulator, over what was measured.
spread: of the repeats. same: the tokens of off, at T = 0 and T = 1.
"""
_WIDTH_OF_A_FILE = 150
RECORDING = """recorded: {target} with {drafter}; acceptance {kept:.4f} of what is replayed,
{long_run:.4f} over {tokens} tokens.
"""


def lookahead_json(result: LookaheadResult, machine: Mapping[str, object]) -> dict[str, object]:
    """The document of `bench lookahead --json`."""
    document: dict[str, object] = {
        "suite": "lookahead",
        "machine": machine,
        "emulated": True,
        "complete": result.is_whole,
        "rounds": result.rounds,
        "profiles": {
            profile.role: {"name": profile.name, "source": profile.source.strip()}
            for profile in (result.target, result.drafter)
        },
        "rows": _rows(result),
    }
    if result.failed:
        document["failed"] = {one.cell.name: one.errors for one in result.failed}
    if result.recording is not None:
        document["recording"] = {
            "target": result.recording.target,
            "drafter": result.recording.drafter,
            "made": result.recording.made,
            "acceptance": result.recording.acceptance,
            "long_run_acceptance": result.recording.long_run_acceptance,
            "long_run_tokens": result.recording.long_run_tokens,
        }
    return document


def print_lookahead(console: Console, result: LookaheadResult) -> None:
    """A row a cell. What is no terminal gets all columns, whatever is said of its width."""
    if not console.is_terminal:
        console = Console(file=console.file, width=_WIDTH_OF_A_FILE)
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    headings = ("rtt", "accept", "hits", "batch", "tok/s", "/GPU", "/off", "theory", "ideal", "eff")
    for heading in (*headings, "len", "idle", "gap", "sim", "spread", "same"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in _rows(result):
        _print_row(table, row)
    console.print(table)
    legend = LEGEND.format(
        target=result.target.name,
        drafter=result.drafter.name,
        dilation=DILATION,
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
    if result.recording is not None:
        about = RECORDING.format(
            target=result.recording.target,
            drafter=result.recording.drafter,
            kept=result.recording.acceptance,
            long_run=result.recording.long_run_acceptance,
            tokens=result.recording.long_run_tokens,
        )
        console.print(about, highlight=False)


def _rows(result: LookaheadResult) -> list[dict[str, object]]:
    """All cells; a layout that is faster than another but worse per GPU is shown as such."""
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
    """Whether two cells answer the same load over the same link; plain decoding has no link."""
    if (one.cell.load, one.cell.batch) != (other.cell.load, other.cell.batch):
        return False
    if other.cell.policy is PolicyName.OFF:
        return True
    conditions = [(cell.rtt_ms, cell.acceptance) for cell in (one.cell, other.cell)]
    return conditions[0] == conditions[1]


def _per_gpu(result: LookaheadResult, one: CellResult) -> float:
    return one.median.tokens_per_second / num_gpus(result, one.cell)


def _row(result: LookaheadResult, one: CellResult) -> dict[str, object]:
    cell, run = one.cell, one.median
    off, natural = cell.policy is PolicyName.OFF, cell.load == NATURAL
    gain = speedup(result, one)
    ideal = None if off else _ideal(result, one)
    simulated = result.simulated.get(cell)
    return {
        "name": cell.name,
        "policy": cell.policy.value,
        "emulated": not natural,
        "dilation": DILATION if cell.load == DILATED else None,
        "rtt_ms": None if off else cell.rtt_ms,
        "acceptance": None if off else _acceptance(one),
        "hit_rate": _hit_rate(one),
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


def _acceptance(one: CellResult) -> float | str:
    """A number, that of the demo pair included; "recorded" where the emulated pair replays it."""
    return "recorded" if one.cell.load == "recorded" else one.acceptance


def _hit_rate(one: CellResult) -> float | str | None:
    cell = one.cell
    if cell.load == "recorded" and cell.policy.value in HITS_BRANCHES:
        return "recorded"
    return cell.hit_rate


def _times(result: LookaheadResult, one: CellResult) -> dict[str, float]:
    """Of plain decoding, and of a draft pass; the demo pair's as they were measured."""
    batch, run = one.cell.batch, one.median
    if one.cell.load == NATURAL:
        step_ms = plain_of(result, one).median.step_ms
        return {"step_ms": step_ms, "draft_ms": run.draft_ms or step_ms}
    return {
        "step_ms": result.target.pass_ms.ms(batch, batch * (1 + one.cell.window)),
        "draft_ms": result.drafter.pass_ms.ms(batch, batch),
    }


def _ideal(result: LookaheadResult, one: CellResult) -> float:
    return closed_forms.ideal_overlap(one.acceptance, **_times(result, one))


def _theory(result: LookaheadResult, one: CellResult) -> float | None:
    """Of the policies that have a closed form."""
    cell, times = one.cell, _times(result, one)
    if cell.policy is PolicyName.LOCKSTEP:
        return closed_forms.lockstep(one.acceptance, cell.window, **times, rtt_ms=cell.rtt_ms)
    if cell.policy is PolicyName.PEARL:
        return closed_forms.pearl(one.acceptance, **times)
    return None


def _print_row(table: Table, row: Mapping[str, object]) -> None:
    acceptance, hits = row["acceptance"], row["hit_rate"]
    idle = [row["target_idle"], row["drafter_idle"]]
    table.add_row(
        _label(row),
        _number(row["rtt_ms"], "g"),
        acceptance if isinstance(acceptance, str) else _number(acceptance, ".2f"),
        hits if isinstance(hits, str) else _number(hits, ".2f"),
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
    kind = " natural" if not row["emulated"] else " dilated" if row["dilation"] else ""
    return f"{row['policy']}{tree}{kind}"


def _number(value: object, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else ""

"""What `bench lookahead` measured: a table beside theory, a document for programs."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from cluster.decoding.policies import PolicyName
from cluster.simulation import closed_forms
from deploy.bench.lookahead import CellResult, LookaheadResult

LEGEND = """
EMULATED: devices replay, with the latency profiles {target} and {drafter}.
/off: tokens/s over plain decoding in this run. theory: the closed form of the policy
(ALGORITHMS.md section 5), without the driver's own time. ideal: every outcome foreseen.
eff: /off over ideal. gap: median ms between two passes of the target with work at hand.
idle: target, drafter. spread: of the repeats. same: the tokens of off, at T = 0 and T = 1.
"""


def lookahead_json(result: LookaheadResult, machine: Mapping[str, object]) -> dict[str, object]:
    """The document of `bench lookahead --json`."""
    return {
        "suite": "lookahead",
        "machine": machine,
        "emulated": True,
        "profiles": {
            profile.role: {"name": profile.name, "source": profile.source.strip()}
            for profile in (result.target, result.drafter)
        },
        "rows": [
            *(_row(result, plain, recorded=key[1]) for key, plain in result.plain.items()),
            *(_row(result, one, recorded=one.cell.acceptance is None) for one in result.cells),
        ],
    }


def same_text(result: LookaheadResult, one: CellResult, *, recorded: bool) -> bool:
    """Whether every run gave the tokens of the first run of plain decoding."""
    texts = result.plain[one.cell.batch, recorded].runs[0].texts
    return all(run.texts == texts for run in one.runs)


def print_lookahead(console: Console, result: LookaheadResult) -> None:
    """A row a cell; at most 100 columns."""
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    headings = ("rtt", "accept", "hits", "batch", "tok/s", "/GPU", "/off", "theory", "ideal", "eff")
    for heading in (*headings, "len", "idle", "gap", "spread", "same"):
        table.add_column(heading, justify="right", no_wrap=True)
    for key, plain in result.plain.items():
        _print_row(table, _row(result, plain, recorded=key[1]))
    for one in result.cells:
        _print_row(table, _row(result, one, recorded=one.cell.acceptance is None))
    console.print(table)
    legend = LEGEND.format(target=result.target.name, drafter=result.drafter.name)
    console.print(legend, highlight=False)


def _row(result: LookaheadResult, one: CellResult, *, recorded: bool) -> dict[str, object]:
    cell, run = one.cell, one.median
    off = cell.policy is PolicyName.OFF
    plain = result.plain[cell.batch, recorded].median
    gpus = result.target.gpus + (0 if off else cell.num_drafters * result.drafter.gpus)
    speedup = run.tokens_per_second / plain.tokens_per_second
    ideal = None if off else _ideal(result, one)
    return {
        "name": f"{cell.name}, as recorded" if off and recorded else cell.name,
        "policy": cell.policy.value,
        "rtt_ms": None if off else cell.rtt_ms,
        "acceptance": None if off else "recorded" if recorded else cell.acceptance,
        "hit_rate": cell.hit_rate,
        "batch": cell.batch,
        "window": 0 if off else cell.window,
        "speedup": speedup,
        "tokens_per_second": run.tokens_per_second,
        "tokens_per_second_per_gpu": run.tokens_per_second / gpus,
        "acceptance_length": run.acceptance_length,
        "acceptance_measured": None if off else one.acceptance,
        "target_idle": run.target_idle,
        "drafter_idle": run.drafter_idle,
        "target_gap_ms": run.gap_ms,
        "theory": None if off else _theory(result, one),
        "ideal": ideal,
        "efficiency": None if ideal is None else speedup / ideal,
        "spread": one.spread,
        "same_text": same_text(result, one, recorded=recorded),
    }


def _times(result: LookaheadResult, one: CellResult) -> dict[str, float]:
    batch, window = one.cell.batch, one.cell.window
    return {
        "step_ms": result.target.pass_ms.ms(batch, batch * (1 + window)),
        "draft_ms": result.drafter.pass_ms.ms(batch, batch),
    }


def _ideal(result: LookaheadResult, one: CellResult) -> float:
    return closed_forms.ideal_overlap(one.acceptance, **_times(result, one))


def _theory(result: LookaheadResult, one: CellResult) -> float | None:
    """Of the policies that have a closed form."""
    cell, times = one.cell, _times(result, one)
    if cell.policy is PolicyName.LOCKSTEP:
        return closed_forms.lockstep(one.acceptance, cell.window, **times, rtt_ms=cell.rtt_ms)
    if cell.policy.value == "pearl":
        return closed_forms.pearl(one.acceptance, **times)
    return None


def _print_row(table: Table, row: Mapping[str, object]) -> None:
    acceptance = row["acceptance"]
    idle = [row["target_idle"], row["drafter_idle"]]
    table.add_row(
        str(row["policy"]),
        _number(row["rtt_ms"], "g"),
        acceptance if isinstance(acceptance, str) else _number(acceptance, ".2f"),
        _number(row["hit_rate"], ".2f"),
        str(row["batch"]),
        _number(row["tokens_per_second"], ".1f"),
        _number(row["tokens_per_second_per_gpu"], ".1f"),
        _number(row["speedup"], ".2f"),
        _number(row["theory"], ".2f"),
        _number(row["ideal"], ".2f"),
        _number(row["efficiency"], ".0%"),
        _number(row["acceptance_length"], ".2f"),
        " ".join(_number(share, ".0%") for share in idle if share is not None),
        _number(row["target_gap_ms"], ".2f"),
        _number(row["spread"], ".1%"),
        "yes" if row["same_text"] else "no",
    )


def _number(value: object, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else ""

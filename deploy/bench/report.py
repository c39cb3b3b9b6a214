"""What `bench decode` measured: a table, the ratios that matter, a document for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.table import Table

from deploy.bench.decode import GAP_TEMPERATURES, DecodeResult
from deploy.bench.interleave import Measured

RATIOS = (("off", "hf", 2.0), ("chain", "hf-assisted", 1.8), ("chain", "off-1", 1.15))
"""A row, the row it is measured against, and the ratio that we aim at on two cores."""
LEGEND = """
spread: of a round over all prompts. len: tokens a step. busy: share of time in
forward passes, target then drafter. gap: median ms between two passes of the
target, at temperature 0/1. same: the tokens of off.
"""


def decode_json(result: DecodeResult, machine: Mapping[str, object]) -> dict[str, object]:
    """The document of `bench decode --json`."""
    rows = by_name(result)
    return {
        "suite": "decode",
        "machine": machine,
        "emulated": False,
        "rows": [_row_json(result, row, rows["off"]) for row in result.rows],
        "ratios": {f"{one}/{other}": ratio for one, other, ratio, _ in ratios(result)},
    }


def by_name(result: DecodeResult) -> dict[str, Measured]:
    """The rows by their names."""
    return {row.contender.name: row for row in result.rows}


def ratios(result: DecodeResult) -> Iterator[tuple[str, str, float, float]]:
    """Row, other row, ratio of their tokens/s, and the ratio that we aim at."""
    rows = by_name(result)
    for one, other, aim in (*RATIOS, ("chain", "lockstep", 1.0)):
        yield one, other, rows[one].tokens_per_second / rows[other].tokens_per_second, aim


def print_decode(console: Console, result: DecodeResult) -> None:
    """The rows, how each ran, and the ratios; at most 80 columns."""
    off = by_name(result)["off"]
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("tok/s", "ms/tok", "/off", "spread", "len", "busy", "gap", "same"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result.rows:
        length = row.acceptance_length
        table.add_row(
            row.contender.name,
            f"{row.tokens_per_second:.1f}",
            f"{1000 / row.tokens_per_second:.1f}",
            f"{row.tokens_per_second / off.tokens_per_second:.2f}",
            f"{row.spread:.0%}",
            "" if length is None else f"{length:.2f}",
            " ".join(f"{share:.0%}" for share in row.busy.values()),
            _gaps_shown(result, row),
            "yes" if row.same_text(off) else "no",
        )
    console.print(table)
    console.print()
    for row in result.rows:
        console.print(f"{row.contender.name}: {row.contender.setting}", highlight=False)
    console.print(LEGEND, highlight=False)
    for one, other, ratio, aim in ratios(result):
        console.print(f"{one} / {other} = {ratio:.2f} (aim {aim:g})", highlight=False)


def _gaps_shown(result: DecodeResult, row: Measured) -> str:
    gaps = [result.gaps_ms.get((row.contender.name, one)) for one in GAP_TEMPERATURES]
    return "/".join(f"{gap:.2f}" for gap in gaps if gap is not None)


def _row_json(result: DecodeResult, row: Measured, off: Measured) -> dict[str, object]:
    name = row.contender.name
    return {
        "name": name,
        "setting": row.contender.setting,
        "speedup": row.tokens_per_second / off.tokens_per_second,
        "tokens": row.tokens,
        "tokens_per_second": row.tokens_per_second,
        "ms_per_token": 1000 / row.tokens_per_second,
        "spread": row.spread,
        "acceptance_length": row.acceptance_length,
        "busy": dict(row.busy),
        "gap_ms_p50": result.gaps_ms.get((name, 0.0)),
        "gap_ms_p50_t1": result.gaps_ms.get((name, 1.0)),
        "same_text": row.same_text(off),
    }

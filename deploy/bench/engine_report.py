"""What `bench engine` measured: a table a part, the ratios that matter, a document for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from deploy.bench.document import document
from deploy.bench.engine_prefix import CACHE
from deploy.bench.engine_rows import OFF, EngineRow

GOALS = ((1, 2.0), (16, 3.0))
"""A batch, and how many times transformers' tokens a second plain decoding should reach."""
GPU_SHARE = 0.8
"""Of a copy's bandwidth, what plain decoding of one sequence on a GPU should reach."""
GPU_WINDOW = 1.1
"""A GPU's step that verifies 8 candidates, over one without: at most this."""
LEGEND = """
step: ms, as the sender of the step sees it. share: of the memory bandwidth
that a plain copy reaches. prefill: tokens/s of one prompt. memory: a shard's
peak over its share of weights and its KV. Every sequence has its full length.
"""


@dataclass(frozen=True, slots=True)
class Goal:
    """A ratio of two rows' tokens a second, and what it should be."""

    name: str
    ratio: float
    aim: float


def goals(rows: Sequence[EngineRow]) -> Iterator[Goal]:
    """Those whose rows were measured: served, our best thread count against transformers'."""
    for batch, aim in GOALS:
        speeds = {
            row.name: row.tokens_per_second
            for row in rows
            if (row.part, row.batch) == ("serving", batch) and row.tokens_per_second
        }
        for name in speeds:
            if name.startswith(OFF) and "hf" in speeds:
                yield Goal(f"batch {batch}: {name} / hf", speeds[name] / speeds["hf"], aim)
    for row in rows:
        if (row.part, row.name) == ("prefix", CACHE) and row.speedup is not None:
            yield Goal(f"{row.batch} prompts that begin alike: cache / off", row.speedup, 5.0)
    yield from _gpu_goals(rows)


def _gpu_goals(rows: Sequence[EngineRow]) -> Iterator[Goal]:
    """Plain decoding of one sequence on a GPU against its memory, and a window against it."""
    for part in dict.fromkeys(row.part for row in rows if row.part.startswith("gpu")):
        alone = {row.window: row for row in rows if (row.part, row.batch) == (part, 1)}
        off, verify = alone.get(0), alone.get(8)
        if off is not None and off.bandwidth_share is not None:
            yield Goal(f"{part}: share of bandwidth", off.bandwidth_share, GPU_SHARE)
        if off is not None and verify is not None and off.step_ms and verify.step_ms:
            ratio = verify.step_ms / off.step_ms
            yield Goal(f"{part}: step of verify 8 / off, at most", ratio, GPU_WINDOW)


def engine_json(
    rows: Sequence[EngineRow], machine: Mapping[str, object], failed: Mapping[str, str]
) -> dict[str, object]:
    """The document of `bench engine --json`; `failed`: of each part that failed, why."""
    return {**document("engine", rows, goals(rows), machine), "failed": dict(failed)}


def print_engine(console: Console, rows: Sequence[EngineRow]) -> None:
    """A table for each part that was measured, then the ratios; at most 80 columns."""
    for part in dict.fromkeys(row.part for row in rows):
        table = Table(box=None, pad_edge=False)
        table.add_column(part, no_wrap=True)
        for heading in ("batch", "threads", "step", "share", "tok/s", "/off", "prefill", "memory"):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in rows:
            if row.part == part:
                table.add_row(*_cells(row))
        console.print(table)
        console.print()
    console.print(LEGEND, highlight=False)
    for goal in goals(rows):
        console.print(f"{goal.name} = {goal.ratio:.2f} (aim {goal.aim:g})", highlight=False)
    for row in rows:
        for line in _remarks(row):
            console.print(line, highlight=False)


def _remarks(row: EngineRow) -> Iterator[str]:
    """What a row has to say that is no column."""
    if row.details.get("same_text") is False:
        yield f"{row.part}, {row.name}: the text is NOT that of the row off"
    if "driver_ms_p50" in row.details:
        told = f"at the least {row.details.get('driver_ms_least', 0):.2f}"
        if "aim_ms" in row.details:
            told = f"aim at most {row.details['aim_ms']:.2f}"
        yield (
            f"driver, {row.name}, batch {row.batch}: {row.details['driver_ms_p50']:.2f} ms a step "
            f"({told})"
        )
    if "delay_steps" in row.details:
        yield (
            f"delay, batch {row.batch}: a prompt of {row.details['prompt_tokens']} tokens delays a "
            f"token by at most {row.details['delay_steps']:.2f} steps (aim 2; 19 of 20 tokens by "
            f"at most {row.details['delay_steps_p95']:.2f}{_less_waits(row)}; without it "
            f"{row.details['delay_steps_without']:.2f} and "
            f"{row.details['delay_steps_without_p95']:.2f})"
        )


def _less_waits(row: EngineRow) -> str:
    less = row.details.get("delay_steps_less_waits")
    if not isinstance(less, float):
        return ""
    return f"; less what the target's threads waited for a core {less:.2f}"


def _cells(row: EngineRow) -> Iterator[str]:
    yield row.name
    yield str(row.batch)
    yield str(row.threads)
    for figure, form in (
        (row.step_ms, ".1f"),
        (row.bandwidth_share, ".0%"),
        (row.tokens_per_second, ".1f"),
        (row.speedup, ".2f"),
        (row.details.get("prefill_tokens_per_second"), ".0f"),
        (row.details.get("memory_ratio"), ".2f"),
    ):
        yield "" if figure is None else format(figure, form)

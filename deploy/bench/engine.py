"""`paceline bench engine`: the target engine alone, compared with transformers in the same run.

Its parts register themselves: steps (engine_steps.py), serving, prefix and delay
(engine_serving.py), driver (engine_driver.py). `--device cuda` runs engine_gpu.py.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from cluster.config.model import Config
from deploy.bench.harness import (
    CORES,
    Asked,
    Document,
    Goal,
    Report,
    Suite,
    document,
    print_goals,
    register,
    table,
)
from paceline.errors import InvalidRequestError
from workers.engine.options import WeightForm, form_on_cpu
from workers.models.catalog import ModelFiles, resolve_model

OFF = "off"
BATCHES = (1, 4, 16)
ALL_BATCHES = (*BATCHES, 64, 1000)
"""The batches of all parts. Only part "driver" has the last two."""
WINDOWS = (0, 4, 8)
GPU_BATCHES = (1, 4, 16, 64)
GPU_WINDOWS = (0, 8)
USUAL_PARTS = ("steps", "serving")
"""The parts that `bench engine` measures without --part."""
CACHE = "prefix cache"
"""Name of the row of part "prefix" that has a prefix cache."""

GOALS = ((1, 2.0), (16, 3.0))
"""A batch, and the ratio of tokens/s of plain decoding to transformers' that it should reach."""
GPU_SHARES = ((1024, 0.8), (1 << 20, 0.75))
"""Up to a context, the share of a copy's bandwidth that plain decoding of one sequence on a GPU
should reach.
"""
GPU_WINDOW_RATIOS = ((1, 1.1), (16, 1.4))
"""A batch, and the upper bound on a GPU's step that verifies 8 candidates, over a plain one."""
GPU_PREFILL = 0.5
"""Share of the rate of a large product that a prefill on a GPU should reach."""
LEGEND = """
step: ms, as the sender of the step sees it. share: of the memory bandwidth
that a plain copy reaches. prefill: tokens/s of one prompt. memory: a shard's
peak over its share of weights and its KV. Every sequence has its full length.
"""

_LOWEST_ID = 3
"""Token ids below this are often special tokens."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineTask:
    """What a part gets to measure with.

    `quick`: measure less, two minutes in total. `batches`: only these; None: all.
    """

    config: Config
    home: Path
    log_folder: Path
    quick: bool
    tell: Callable[[str], None]
    batches: Collection[int] | None = None

    def batches_of(self, all_batches: Iterable[int]) -> list[int]:
        """Those of `all_batches` that are to be measured."""
        return [one for one in all_batches if self.batches is None or one in self.batches]

    def target_files(self) -> ModelFiles:
        """The target's checkpoint, and the form of its weights on a CPU by target.dtype."""
        target = self.config.target
        files = resolve_model(target.model, home=self.home)
        return replace(files, weights=form_on_cpu(target.dtype, files.weights))


def peer_dtype(form: WeightForm) -> str:
    """The dtype in which transformers computes: bfloat16 if our weights have it, else float32."""
    return "bfloat16" if form == "bfloat16" else "float32"


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One row; None where a figure does not apply. A row is named by part, batch and name.

    `engine` is "paceline", "transformers" or "openvino". `degree` is the number of shards,
    `threads` the threads of each. `tokens_per_second` counts output tokens; a step with a window
    counts as if no candidate was accepted. `bandwidth_share` is the bytes that a step must read
    over the bytes that a copy moves in the same time. `speedup` is the ratio to the row `off` of
    the same part and batch. `details` are further figures by name.
    """

    part: str
    name: str
    engine: str
    batch: int
    window: int
    degree: int
    dtype: str
    threads: int
    step_ms: float | None = None
    bandwidth_share: float | None = None
    tokens_per_second: float | None = None
    speedup: float | None = None
    details: Mapping[str, object] = field(default_factory=dict)


def with_speedups(rows: Sequence[EngineRow]) -> list[EngineRow]:
    """The rows with `speedup` set where there is a row `off` to compare with."""
    plain = {(row.part, row.batch): row for row in rows if row.name == OFF}

    def speedup(row: EngineRow) -> float | None:
        off = plain.get((row.part, row.batch))
        if off is None or off.tokens_per_second is None or row.tokens_per_second is None:
            return row.speedup
        return row.tokens_per_second / off.tokens_per_second

    return [replace(row, speedup=speedup(row)) for row in rows]


def own_name(*, window: int, degree: int, threads: int) -> str:
    """The name of a row of ours. "off" is plain decoding by one shard on all cores."""
    parts = [f"verify {window}" if window else OFF]
    if degree > 1:
        parts.append(f"degree {degree}")
    if degree * threads < CORES:
        parts.append(f"{threads} thread" + ("s" if threads > 1 else ""))
    return ", ".join(parts)


Part = Callable[[EngineTask], Iterable[EngineRow]]
"""A part: a function that takes the task and yields each row once it is measured."""

PARTS: dict[str, Part] = {}


def measures(name: str) -> Callable[[Part], Part]:
    """Register the decorated function as the part that `--part NAME` measures."""

    def add(measure: Part) -> Part:
        PARTS[name] = measure
        return measure

    return add


def random_tokens(count: int, *, vocab_size: int, seed: int) -> list[int]:
    """`count` token ids. The same arguments give the same ids."""
    generator = random.Random(seed)
    return [generator.randrange(_LOWEST_ID, vocab_size) for _ in range(count)]


@dataclass(slots=True)
class EngineResult:
    """The measured rows, and for each part that failed, the reason."""

    rows: list[EngineRow] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def run_engine(
    task: EngineTask, parts: Sequence[str], save: Callable[[EngineResult], None]
) -> EngineResult:
    """Measure the named parts in the order of PARTS. Missing models are fetched.

    `save` gets the result after each row. If a part fails, its finished rows stay, and the run goes
    on with the next part. Raises what target_files raises.
    """
    task.target_files()
    result = EngineResult()
    for name in [one for one in PARTS if one in parts]:
        try:
            for row in PARTS[name](task):
                result.rows = with_speedups([*result.rows, row])
                save(result)
        except Exception as error:  # It must not lose the results of other parts, which take hours.
            _log.exception("part %s of bench engine failed", name)
            result.failed[name] = f"{type(error).__name__}: {error}"
            save(result)
    return result


def goals(rows: Sequence[EngineRow]) -> Iterator[Goal]:
    """The goals whose rows were measured."""
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
    """On a GPU: bandwidth of plain decoding, windows against plain decoding, and prefill."""
    for part in dict.fromkeys(row.part for row in rows if row.part.startswith("gpu")):
        found = {(row.batch, row.window): row for row in rows if row.part == part}
        off = found.get((1, 0))
        if off is not None and off.bandwidth_share is not None:
            context, prefill = (
                float(str(off.details[name])) for name in ("context", "prefill_share_of_products")
            )
            aim = next(share for most, share in GPU_SHARES if context <= most)
            yield Goal(f"{part}: share of bandwidth", off.bandwidth_share, aim)
            yield Goal(f"{part}: prefill, share of products", prefill, GPU_PREFILL)
        for batch, aim in GPU_WINDOW_RATIOS:
            plain, verify = found.get((batch, 0)), found.get((batch, 8))
            if plain is not None and verify is not None and plain.step_ms and verify.step_ms:
                ratio = verify.step_ms / plain.step_ms
                yield Goal(f"{part}: {batch} x verify 8 / off, at most", ratio, aim)


def engine_json(
    rows: Sequence[EngineRow], machine: Mapping[str, object], failed: Mapping[str, str]
) -> dict[str, object]:
    """The document of `bench engine --json`. `failed`: why each failed part failed."""
    return {**document("engine", rows, goals(rows), machine), "failed": dict(failed)}


def print_engine(console: Console, rows: Sequence[EngineRow]) -> None:
    """Print a table for each part that was measured, then the ratios; at most 80 columns."""
    for part in dict.fromkeys(row.part for row in rows):
        headings = ("batch", "threads", "step", "share", "tok/s", "/off", "prefill", "memory")
        shown = table((part, *headings))
        for row in rows:
            if row.part == part:
                shown.add_row(*_cells(row))
        console.print(shown)
        console.print()
    console.print(LEGEND, highlight=False)
    print_goals(console, goals(rows))
    for row in rows:
        for line in _remarks(row):
            console.print(line, highlight=False)


def _remarks(row: EngineRow) -> Iterator[str]:
    """Remarks on a row that fit into no column."""
    if row.details.get("same_text") is False:
        yield f"{row.part}, {row.name}: the text is NOT that of the row off"
    if "driver_ms_p50" in row.details:
        yield (
            f"driver, {row.name}, batch {row.batch}: {row.details['driver_ms_p50']:.2f} ms a step "
            f"(at the least {row.details['driver_ms_least']:.2f}; aim {row.details['aim_ms']:.2f})"
        )
    if "delay_steps" in row.details:
        yield (
            f"delay, batch {row.batch}: a prompt of {row.details['prompt_tokens']} tokens delays a "
            f"token by at most {row.details['delay_steps']:.2f} steps (aim 2; 19 of 20 tokens by "
            f"at most {row.details['delay_steps_p95']:.2f}; without it "
            f"{row.details['delay_steps_without']:.2f} and "
            f"{row.details['delay_steps_without_p95']:.2f})"
        )


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


def _run(asked: Asked) -> Report:
    if asked.device == "cuda":
        return _run_on_gpu(asked)
    if asked.device not in (None, "cpu"):
        raise InvalidRequestError("device", f"expected cpu or cuda, got {asked.device!r}")

    def written(result: EngineResult) -> Document:
        return engine_json(result.rows, asked.machine, result.failed)

    task = EngineTask(asked.config, asked.home, asked.folder, asked.quick, asked.tell, asked.batch)
    result = run_engine(task, asked.part or USUAL_PARTS, lambda result: asked.save(written(result)))

    def show(console: Console) -> None:
        print_engine(console, result.rows)
        for name, why in result.failed.items():
            Console(stderr=True).print(f"part {name} failed: {why}", highlight=False, markup=False)

    return Report(written(result), show)


def _run_on_gpu(asked: Asked) -> Report:
    from deploy.bench.engine_gpu import gpu_task, measure_gpu
    from workers.process.kernels import use_kernels

    use_kernels(asked.config.target.kernels)
    task = gpu_task(
        asked.shape or "8b",
        quick=asked.quick,
        batches=asked.batch,
        contexts=asked.context,
        kv_dtype=asked.kv_cache_dtype or asked.config.target.kv_cache_dtype,
    )
    rows: list[EngineRow] = []
    for row in measure_gpu(task, asked.tell):
        rows = with_speedups([*rows, row])
        asked.save(engine_json(rows, asked.machine, {}))
    return Report(engine_json(rows, asked.machine, {}), lambda console: print_engine(console, rows))


register(
    Suite(
        "engine",
        "steps (5 minutes), serving (10), prefix (3), driver (2) and delay (2); without --part "
        "steps and serving, beside transformers. A part that fails costs its own rows alone. With "
        "--device cuda: a step of the GPU engine, with a random model of --shape (8b, 70b-rank, 1b "
        "or 0.5b) and sequences of --context tokens, their KV in --kv-cache-dtype",
        _run,
        frozenset({"part", "batch", "quick", "device", "context", "shape", "kv_cache_dtype"}),
        parts=PARTS.keys(),
        batches=ALL_BATCHES,
    )
)

"""`paceline bench engine`: the target engine by itself, beside transformers in the same run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from deploy.bench.engine_delay import measure_delay
from deploy.bench.engine_driver import BATCHES as DRIVER_BATCHES
from deploy.bench.engine_driver import measure_driver
from deploy.bench.engine_prefix import measure_prefix
from deploy.bench.engine_rows import BATCHES, EngineRow, EngineTask, with_speedups
from deploy.bench.engine_serving import measure_serving
from deploy.bench.engine_steps import measure_steps

PARTS: Mapping[str, Callable[[EngineTask], list[EngineRow]]] = {
    "steps": measure_steps,
    "serving": measure_serving,
    "prefix": measure_prefix,
    "driver": measure_driver,
    "delay": measure_delay,
}
"""What can be measured. A further part is a function that takes the task and gives rows."""
ALL_BATCHES = sorted({*BATCHES, *DRIVER_BATCHES})
"""Batches that some part measures."""
USUAL_PARTS = ("steps", "serving")
"""Those of `bench engine` without --part."""


def run_engine(task: EngineTask, parts: Sequence[str]) -> list[EngineRow]:
    """The rows of the parts named, in the order of PARTS. Models that are absent are fetched."""
    rows: list[EngineRow] = []
    for name, measure in PARTS.items():
        if name in parts:
            rows += measure(task)
    return with_speedups(rows)

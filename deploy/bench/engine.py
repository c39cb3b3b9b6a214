"""`paceline bench engine`: the target engine by itself, beside transformers in the same run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from deploy.bench.engine_delay import measure_delay
from deploy.bench.engine_driver import ALL_BATCHES as DRIVER_BATCHES
from deploy.bench.engine_driver import measure_driver
from deploy.bench.engine_prefix import measure_prefix
from deploy.bench.engine_rows import BATCHES, EngineRow, EngineTask, with_speedups
from deploy.bench.engine_serving import measure_serving
from deploy.bench.engine_steps import measure_steps

PARTS: Mapping[str, Callable[[EngineTask], Iterable[EngineRow]]] = {
    "steps": measure_steps,
    "serving": measure_serving,
    "prefix": measure_prefix,
    "driver": measure_driver,
    "delay": measure_delay,
}
"""What can be measured. A further part is a function that takes the task and gives rows, each as
soon as it is measured."""
ALL_BATCHES = sorted({*BATCHES, *DRIVER_BATCHES})
"""Batches that some part measures."""
USUAL_PARTS = ("steps", "serving")
"""Those of `bench engine` without --part."""


_log = logging.getLogger(__name__)


@dataclass(slots=True)
class EngineResult:
    """The rows so far, and of each part that failed its name and why."""

    rows: list[EngineRow] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def run_engine(
    task: EngineTask, parts: Sequence[str], save: Callable[[EngineResult], None]
) -> EngineResult:
    """The rows of the parts named, in the order of PARTS. Models that are absent are fetched.

    `save` is called with all that is there after each row. A part that fails does not end the run:
    its rows so far stay, and the next part goes on. Raises what target_files raises.
    """
    task.target_files()
    result = EngineResult()
    for name in [one for one in PARTS if one in parts]:
        try:
            for row in PARTS[name](task):
                result.rows = with_speedups([*result.rows, row])
                save(result)
        except Exception as error:  # Whatever it is, hours of other parts must not be lost by it.
            _log.exception("part %s of bench engine failed", name)
            result.failed[name] = f"{type(error).__name__}: {error}"
            save(result)
    return result

"""The rows of `bench engine`, and what every part of it is given."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cluster.config_model import Config
from deploy.bench.decode import CORES
from workers.engine.weight_form import WeightForm, form_on_cpu
from workers.models import ModelFiles, resolve_model

OFF = "off"
BATCHES = (1, 4, 16)
WINDOWS = (0, 4, 8)


@dataclass(frozen=True, slots=True)
class EngineTask:
    """What a part measures with.

    `quick`: with less of everything, in two minutes in all. `batches`: those alone; None: all.
    """

    config: Config
    home: Path
    log_folder: Path
    quick: bool
    tell: Callable[[str], None]
    batches: Collection[int] | None = None

    def batches_of(self, all_batches: Iterable[int]) -> list[int]:
        """Which of these are to be measured."""
        return [one for one in all_batches if self.batches is None or one in self.batches]

    def target_files(self) -> ModelFiles:
        """The target's checkpoint, and the form that target.dtype has it held in on a CPU."""
        target = self.config.target
        files = resolve_model(target.model, home=self.home)
        return replace(files, weights=form_on_cpu(target.dtype, files.weights))


def peer_dtype(form: WeightForm) -> str:
    """What transformers computes in beside ours: bfloat16 beside bfloat16, else float32."""
    return "bfloat16" if form == "bfloat16" else "float32"


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One row; None where a figure does not apply. A row is named by part, batch and name.

    `engine` is "paceline", "transformers" or "transformers-continuous"; `degree` how many shards
    there are, `threads` what each has. `tokens_per_second` are output tokens, those of a window
    counted as if none of its candidates were accepted. `bandwidth_share` is what a step must read
    over what a copy moves in the same time. `speedup` is against the row `off` of the same part
    and batch. `details` are further figures by name.
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
    """How a row of ours is called: "off" is plain decoding by one shard on all cores."""
    parts = [f"verify {window}" if window else OFF]
    if degree > 1:
        parts.append(f"degree {degree}")
    if degree * threads < CORES:
        parts.append(f"{threads} thread" + ("s" if threads > 1 else ""))
    return ", ".join(parts)

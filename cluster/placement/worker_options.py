"""The options of a worker, from the configuration and its place in the plan.

Slow imports happen where they are needed.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.config.model import Config
from cluster.placement.plan import WorkerPlan

if TYPE_CHECKING:
    from workers.drafting.drafter import DrafterOptions
    from workers.models.catalog import ModelFiles
    from workers.target.shard import TargetShardOptions


async def files_of(home: Path, model: str) -> ModelFiles:
    """A model's files on this host. Raises what resolve_model raises."""
    from workers.models.catalog import resolve_model

    return await asyncio.to_thread(resolve_model, model, home=home)


def shard_options(config: Config, plan: WorkerPlan, files: ModelFiles) -> TargetShardOptions:
    """The options of a shard that computes."""
    from workers.engine.parallel.cuts import Place
    from workers.engine.parallel.group import Deadlines
    from workers.target.shard import TargetShardOptions

    target = config.target
    return TargetShardOptions(
        folder=files.folder,
        weights=files.weights,
        threads=plan.threads,
        kv_memory_bytes=_kv_bytes(config),
        max_model_len=None if target.max_model_len == "auto" else target.max_model_len,
        cores=plan.cores,
        device="cuda" if plan.reserved_gpus else "cpu",
        dtype=target.dtype,
        batch_invariant=target.batch_invariant,
        kernels=target.kernels,
        place=Place(plan.rank, plan.degree),
        # A rank that waits for a hung one must give up before it seems to hang itself.
        deadlines=Deadlines(collective=target.hung_after / 2),
    )


def drafter_options(config: Config, plan: WorkerPlan, files: ModelFiles | None) -> DrafterOptions:
    """The options of a drafter that computes. `files`: those of its model; None: it has none."""
    from workers.drafting.drafter import DrafterOptions

    assert plan.kind != "target"
    assert plan.drafter is not None
    options = DrafterOptions(
        kind=plan.kind,
        threads=plan.threads,
        max_sequences=config.target.max_num_seqs,
        cores=plan.cores,
    )
    if files is None:
        return options
    return replace(
        options,
        folder=files.folder,
        weights=files.weights,
        kv_memory_bytes=_kv_bytes(config),
        device="cuda" if plan.reserved_gpus else "cpu",
        kernels=config.target.kernels,
        prefix_cache=plan.drafter.prefix_cache,
    )


def _kv_bytes(config: Config) -> int | None:
    """Bytes for KV; None: the worker chooses by the memory of its device."""
    return None if config.target.kv_memory == "auto" else config.target.kv_memory

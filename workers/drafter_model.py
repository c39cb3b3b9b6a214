"""Loads the model of a drafter. A separate module, because it imports transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import ConfigError
from workers.drafting.model import ModelProposer
from workers.kernels import use_kernels
from workers.loading import load_engine

if TYPE_CHECKING:
    from workers.drafter import DrafterOptions


async def load_model_proposer(options: DrafterOptions) -> ModelProposer:
    """Load a proposer of kind "model" in a thread. Raises ConfigError and CheckpointError."""
    if options.folder is None:
        raise ConfigError('a drafter of kind "model" needs a checkpoint folder, got none')
    if options.kernels:
        use_kernels(True)
    engine = await load_engine(
        options.folder,
        weights=options.weights,
        threads=options.threads,
        kv_memory_bytes=options.kv_memory_bytes,
        device=options.device,
    )
    return ModelProposer(engine, prefix_cache=options.prefix_cache)

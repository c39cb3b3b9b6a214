"""Loads the model of a drafter. A separate module, because it imports transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import ConfigError
from workers.drafting.model import ModelProposer
from workers.engine.open import AnyEngine
from workers.loading import load_engine

if TYPE_CHECKING:
    from workers.drafter import DrafterOptions


async def load_model_proposer(options: DrafterOptions) -> ModelProposer:
    """A proposer of kind "model". Raises ConfigError and CheckpointError as serve_drafter does."""
    return ModelProposer(await load_drafter_model(options), prefix_cache=options.prefix_cache)


async def load_drafter_model(options: DrafterOptions) -> AnyEngine:
    """Load a drafter's model in a thread. Raises ConfigError and CheckpointError."""
    if options.folder is None:
        raise ConfigError('a drafter of kind "model" needs a checkpoint folder, got none')
    return await load_engine(
        options.folder,
        weights=options.weights,
        threads=options.threads,
        kv_memory_bytes=options.kv_memory_bytes,
        device=options.device,
    )

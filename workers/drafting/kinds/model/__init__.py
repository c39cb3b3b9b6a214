"""The kind "model": drafts with a small model. proposer.py has what needs torch."""

from __future__ import annotations

import asyncio
import time

from paceline.errors import ConfigError
from workers.drafting.kind import DRAFTERS, DrafterKind, DrafterOptions, Proposer


async def load_model_proposer(options: DrafterOptions) -> Proposer:
    """Load the checkpoint in a thread. Raises ConfigError and CheckpointError."""
    from workers.drafting.kinds.model.proposer import ModelProposer
    from workers.engine.open import load_engine
    from workers.verification.grammars import Grammars

    if options.folder is None:
        raise ConfigError('a drafter of kind "model" needs a checkpoint folder, got none')
    engine = await load_engine(
        options.folder,
        weights=options.weights,
        threads=options.threads,
        kv_memory_bytes=options.kv_memory_bytes,
        device=options.device,
        kernels=options.kernels,
    )
    grammars = await asyncio.to_thread(
        Grammars,
        options.folder,
        vocab_size=engine.info.vocab_size,
        end_token_ids=engine.info.end_token_ids,
        clock=time.thread_time,
    )
    return ModelProposer(engine, prefix_cache=options.prefix_cache, grammars=grammars)


def _check(options: DrafterOptions) -> None:
    from workers.engine.open import check_ahead

    assert options.folder is not None
    check_ahead(
        options.folder,
        device="cpu" if options.device == "cpu" else "cuda",
        weights=options.weights,
        kv_memory_bytes=options.kv_memory_bytes,
    )


MODEL = DRAFTERS.add(
    DrafterKind(
        name="model",
        help="a small model of the target's vocabulary, drawing as the rule asks",
        paper="Leviathan et al. 2023, arXiv:2211.17192",
        load=load_model_proposer,
        candidates=None,
        default_model="demo-draft",
        check=_check,
    )
)

"""The kind "model": drafts with a small model. proposer.py has what needs torch."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from paceline.errors import ConfigError
from workers.drafting.kind import DRAFTERS, DrafterKind, DrafterOptions, Proposer
from workers.engine.options import KvDtype

if TYPE_CHECKING:
    from workers.engine.engine import Engine
    from workers.verification.grammars import Grammars

KV_TOKENS = 4096
"""On a GPU without a given size, KV memory holds this number of tokens for each sequence."""

SHORT = 16
"""Maximum number of committed tokens without KV that do not count as prefill. They are fed at once,
so the tokens of a verdict usually need no turn for prefill.
"""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The table `drafters.options`.

    `max_model_len`: the drafter does not draft beyond this position; None: the checkpoint's own.
    `kv_memory_mib`: memory for KV; None: `target.kv_memory`. `kv_cache_dtype`: as that of the
    target.
    """

    max_model_len: Annotated[int, Field(ge=1)] | None = None
    kv_memory_mib: Annotated[int, Field(ge=1)] | None = None
    kv_cache_dtype: KvDtype = "auto"


@dataclass(frozen=True, slots=True)
class LearningOptions(ModelOptions):
    """The table `drafters.options` of the kind `model`.

    `learn`: while it has nothing to draft, it learns to draft each tenant's texts (online.py).
    """

    learn: bool = False


def _own(options: DrafterOptions) -> ModelOptions:
    own = options.of_kind
    return own if isinstance(own, ModelOptions) else ModelOptions()


def _kv_bytes(options: DrafterOptions) -> int | None:
    own = _own(options).kv_memory_mib
    return options.kv_memory_bytes if own is None else own << 20


async def load_model_proposer(options: DrafterOptions) -> Proposer:
    """Load the checkpoint in a thread. Raises ConfigError and CheckpointError.

    A row of a drafter may have other bits in another batch: the target decides the text.
    """
    from workers.drafting.kinds.model.proposer import ModelProposer

    engine, grammars = await load_drafting_engine(options)
    own = options.of_kind
    return ModelProposer(
        engine,
        prefix_cache=options.prefix_cache,
        grammars=grammars,
        learns=isinstance(own, LearningOptions) and own.learn,
    )


async def load_drafting_engine(options: DrafterOptions) -> tuple[Engine, Grammars]:
    """A drafter's engine, and what compiles structures for it. Raises as load_model_proposer."""
    from workers.engine.open import load_engine
    from workers.verification.grammars import Grammars

    if options.folder is None:
        raise ConfigError(f'a drafter of kind "{options.kind}" needs a checkpoint folder, got none')
    engine = await load_engine(
        options.folder,
        weights=options.weights,
        threads=options.threads,
        cores=options.cores,
        kv_memory_bytes=_kv_bytes(options),
        kv_tokens=options.max_sequences * KV_TOKENS,
        max_model_len=_own(options).max_model_len,
        device=options.device,
        kv_dtype=_own(options).kv_cache_dtype,
        batch_invariant=False,
        chains=True,
        kernels=options.kernels,
        cache=options.cache,
    )
    grammars = await asyncio.to_thread(
        Grammars,
        options.folder,
        vocab_size=engine.info.vocab_size,
        end_token_ids=engine.info.end_token_ids,
        clock=time.thread_time,
    )
    return engine, grammars


def check_model(options: DrafterOptions) -> None:
    """See DrafterKind.check."""
    from workers.engine.open import check_ahead

    assert options.folder is not None
    check_ahead(
        options.folder,
        device="cpu" if options.device == "cpu" else "cuda",
        weights=options.weights,
        kv_memory_bytes=_kv_bytes(options),
        kv_dtype=_own(options).kv_cache_dtype,
        max_model_len=_own(options).max_model_len,
    )


MODEL = DRAFTERS.add(
    DrafterKind(
        name="model",
        help="a small model of the target's vocabulary, drawing as the rule asks",
        paper="Leviathan et al. 2023, arXiv:2211.17192",
        load=load_model_proposer,
        candidates=None,
        default_model="demo-draft",
        check=check_model,
        options=LearningOptions,
    )
)

"""The kind "model": drafts with a small model. proposer.py has what needs torch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from paceline.errors import ConfigError
from workers.drafting.kind import DRAFTERS, DrafterKind, DrafterOptions, Proposer
from workers.engine.options import KvDtype, WeightForm

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
class EngineOptions:
    """Options of every kind with a model.

    `max_model_len`: the drafter does not draft beyond this position; None: the checkpoint's own.
    `kv_memory_mib`: memory for KV; None: `target.kv_memory`. `kv_cache_dtype`: as that of the
    target. `weights`: the form in which a CPU holds them; None: as the model has them.
    """

    max_model_len: Annotated[int, Field(ge=1)] | None = None
    kv_memory_mib: Annotated[int, Field(ge=1)] | None = None
    kv_cache_dtype: KvDtype = "auto"
    weights: WeightForm | None = None


@dataclass(frozen=True, slots=True)
class ModelOptions(EngineOptions):
    """The table `drafters.options`: those of every kind with a model, and two more.

    `tokenizer`: a folder on the drafter's host with the target's tokenizer, for a model of another
    vocabulary (docs/drafters.md#another-vocabulary). `learn`: while it has nothing to draft, it
    learns to draft each tenant's texts (online.py).
    """

    tokenizer: Path | None = None
    learn: bool = False

    def __post_init__(self) -> None:
        if self.tokenizer is not None and not self.tokenizer.is_absolute():
            raise ValueError("Input should be an absolute path")


def _own(options: DrafterOptions) -> EngineOptions:
    own = options.of_kind
    return own if isinstance(own, EngineOptions) else EngineOptions()


def _kv_bytes(options: DrafterOptions) -> int | None:
    own = _own(options).kv_memory_mib
    return options.kv_memory_bytes if own is None else own << 20


async def load_model_proposer(options: DrafterOptions) -> Proposer:
    """Load the checkpoint in a thread. Raises ConfigError and CheckpointError.

    A row of a drafter may have other bits in another batch: the target decides the text.
    """
    from workers.drafting.kinds.model.proposer import ModelProposer
    from workers.drafting.kinds.model.translation import Translation
    from workers.engine.load.checkpoint import end_tokens_of

    engine = await load_drafting_engine(options)
    folder, size, ends = options.folder, engine.info.vocab_size, engine.info.end_token_ids
    assert folder is not None
    own = options.of_kind if isinstance(options.of_kind, ModelOptions) else ModelOptions()
    target, translation = own.tokenizer, None
    if target is not None:
        translation = await asyncio.to_thread(Translation, folder, size, target)
        folder, size, ends = target, translation.target.size, end_tokens_of(target)
    return ModelProposer(
        engine,
        prefix_cache=options.prefix_cache,
        grammars=await load_grammars(folder, size, ends),
        translation=translation,
        learns=own.learn,
    )


async def load_drafting_engine(options: DrafterOptions) -> Engine:
    """A drafter's engine. Raises as load_model_proposer."""
    from workers.engine.open import load_engine, open_engine

    if options.folder is None:
        raise ConfigError(f'a drafter of kind "{options.kind}" needs a checkpoint folder, got none')
    opening = partial(
        open_engine,
        options.folder,
        weights=_own(options).weights or options.weights,
        threads=options.threads,
        cores=options.cores,
        kv_memory_bytes=_kv_bytes(options),
        kv_tokens=options.max_sequences * KV_TOKENS,
        max_model_len=_own(options).max_model_len,
        device=options.device,
        kv_dtype=_own(options).kv_cache_dtype,
        batch_invariant=False,
        drafts=True,
        kernels=options.kernels,
        cache=options.cache,
    )
    return await load_engine(opening, threads=options.threads)


async def load_grammars(folder: Path, vocab_size: int, end_token_ids: Sequence[int]) -> Grammars:
    """What compiles structures. `folder`: with the tokenizer of what is drafted."""
    from workers.verification.grammars import Grammars

    return await asyncio.to_thread(
        Grammars,
        folder,
        vocab_size=vocab_size,
        end_token_ids=end_token_ids,
        clock=time.thread_time,
    )


def check_model(options: DrafterOptions) -> None:
    """See DrafterKind.check."""
    from workers.engine.open import check_ahead

    assert options.folder is not None
    check_ahead(
        options.folder,
        device="cpu" if options.device == "cpu" else "cuda",
        weights=_own(options).weights or options.weights,
        kv_memory_bytes=_kv_bytes(options),
        kv_dtype=_own(options).kv_cache_dtype,
        max_model_len=_own(options).max_model_len,
    )


MODEL = DRAFTERS.add(
    DrafterKind(
        name="model",
        help="a small model, drawing as the rule asks",
        paper="Leviathan et al. 2023, arXiv:2211.17192",
        load=load_model_proposer,
        candidates=None,
        default_model="demo-draft",
        check=check_model,
        options=ModelOptions,
    )
)

"""The kind "parallel": a model that drafts several tokens in one pass (PARD). See proposer.py."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from paceline.errors import CheckpointError
from workers.drafting.kind import DRAFTERS, DrafterKind, DrafterOptions, Grant, Proposer
from workers.drafting.kinds.model import (
    EngineOptions,
    check_model,
    load_drafting_engine,
    load_grammars,
)

MASK_KEYS = ("pard_token", "ptd_token_id")
"""Where config.json names the mask token: in AMD's PARD checkpoints, and in others for vLLM."""

MAX_ROWS = 128
"""Maximum number of rows of one sequence in a pass. With more outcomes each gets fewer."""


def rows_each(most: int, nodes: int, grant: Grant) -> int:
    """The rows that a pass gives each of several nodes; `most`: those that the drafter can.

    A chain gets half of them while drafting is free: there is time for further passes, whose rows
    are right more often than the later ones of this pass. With branches passes take longer.
    """
    if grant.drafting_is_free and not grant.fan_out:
        most = (most + 1) // 2
    return max(1, min(most, MAX_ROWS // nodes))


@dataclass(frozen=True, slots=True)
class ParallelOptions(EngineOptions):
    """The table `drafters.options`: those of every kind with a model, and `parallel_tokens`.

    `parallel_tokens`: the most tokens that a pass drafts after one outcome; half as many of a chain
    while drafting is free. Published PARD checkpoints are trained for 8 and still draft well at 12.
    """

    parallel_tokens: Annotated[int, Field(ge=1, le=32)] = 8


def mask_token_of(folder: Path) -> int:
    """The mask token that a checkpoint's config.json names. Raises CheckpointError."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: expected a JSON object: {error}") from None
    for key in MASK_KEYS:
        token_id = config.get(key)
        if token_id is None:
            continue
        vocab_size = config.get("vocab_size", 0)
        if isinstance(token_id, int) and 0 <= token_id < vocab_size:
            return token_id
        raise CheckpointError(
            f"{path}: expected {key} to be a token id below vocab_size ({vocab_size}), got "
            f"{token_id!r}"
        )
    raise CheckpointError(
        f"{path}: expected the mask token of a parallel drafter as {' or '.join(MASK_KEYS)}, got "
        'neither; take a checkpoint that was trained as PARD, or the drafter kind "model"'
    )


async def _load(options: DrafterOptions) -> Proposer:
    from workers.drafting.kinds.parallel.proposer import ParallelProposer

    engine = await load_drafting_engine(options)
    assert options.folder is not None
    info = engine.info
    mask_token_id = mask_token_of(options.folder)
    own = options.of_kind
    return ParallelProposer(
        engine,
        mask_token_id,
        parallel_tokens=own.parallel_tokens if isinstance(own, ParallelOptions) else 8,
        prefix_cache=options.prefix_cache,
        grammars=await load_grammars(options.folder, info.vocab_size, info.end_token_ids),
    )


def _check(options: DrafterOptions) -> None:
    assert options.folder is not None
    mask_token_of(options.folder)
    check_model(options)


PARALLEL = DRAFTERS.add(
    DrafterKind(
        name="parallel",
        help="a small model that drafts several tokens in one pass, by mask tokens",
        paper="An et al. 2025, PARD, arXiv:2504.18583",
        load=_load,
        candidates=None,
        default_model="demo-draft",
        check=_check,
        options=ParallelOptions,
    )
)

"""A real shard, as `python -m workers.target.shard`, whose forward pass fails at certain tokens.

    python -m tests.cluster.faulty_shard FOLDER --port 9001

What each token does as soon as it is fed, in any step of any sequence:
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file

from workers.engine.cpu.engine import CpuEngine
from workers.engine.slices import Slice
from workers.target import shard as target_shard

KILLS = 383
"""The process ends at once, without a word."""
TAKES_ALL_MEMORY = 382
"""The pass asks for more memory than there is."""
BREAKS_THE_DEVICE = 381
"""Every pass fails from then on, as after a CUDA error, until there is a new process."""
BREAKS_EVERYTHING = 380
"""As BREAKS_THE_DEVICE, but the error does not name the device."""
IS_NO_NUMBER = 379
"""The pass gives NaN for this token and for all that come after it (`with_nan`)."""
POISON = (KILLS, TAKES_ALL_MEMORY, BREAKS_THE_DEVICE, BREAKS_EVERYTHING, IS_NO_NUMBER)


def with_nan(folder: Path) -> Path:
    """Make the embedding of IS_NO_NUMBER NaN. The model never chooses a token of POISON.

    The checkpoint's embedding must not be its LM head.
    """
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][IS_NO_NUMBER] = torch.nan
    heads = tensors["lm_head.weight"]
    # Unlikely after any prefix: its logit is that of the average token.
    heads[min(POISON) :] = 0.0
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def _fail_at_poison() -> None:
    step_part = CpuEngine.step_part
    broken: dict[str, Exception] = {}

    def failing(engine: CpuEngine, slices: Sequence[Slice]) -> Any:
        # The start-up self-test feeds random tokens.
        fed = {token for piece in slices for token in piece.token_ids} if _serves(engine) else ()
        if KILLS in fed:
            os.kill(os.getpid(), signal.SIGKILL)
        if TAKES_ALL_MEMORY in fed:
            torch.empty(1 << 50)
        if BREAKS_THE_DEVICE in fed:
            broken["why"] = torch.AcceleratorError("CUDA error: an illegal memory access")
        if BREAKS_EVERYTHING in fed:
            broken["why"] = ValueError("the weights are gone")
        if broken:
            raise broken["why"]
        return step_part(engine, slices)

    pytest.MonkeyPatch().setattr(CpuEngine, "step_part", failing)


def _serves(engine: CpuEngine) -> bool:
    return engine.batch_invariant is not None


if __name__ == "__main__":
    _fail_at_poison()
    typer.run(target_shard.main)

"""Loading a checkpoint into Hugging Face's own model code, changed where the engine needs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from paceline.errors import CheckpointError
from workers.engine import attention
from workers.engine.fusing import join_projections, replace_norms
from workers.engine.invariance import replace_activations
from workers.engine.linears import convert_weights
from workers.engine.weight_form import WeightForm


def load_model(folder: Path, weights: WeightForm) -> PreTrainedModel:
    """The model with paged attention and our own modules. Raises CheckpointError."""
    model = load_plain_model(folder)
    join_projections(model)
    convert_weights(model, weights)
    replace_activations(model)
    replace_norms(model)
    return model


def load_plain_model(folder: Path) -> PreTrainedModel:
    """The float32 model as Hugging Face has it, but for paged attention. Raises CheckpointError."""
    attention.register()
    with _quiet():
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=torch.float32,
                attn_implementation=attention.NAME,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except Exception as error:  # transformers raises many kinds
            raise CheckpointError(f"{folder} could not be loaded: {error}") from error
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:
        raise CheckpointError(f"{folder} lacks tensors that the model needs, first {missing[0]}")
    assert isinstance(model, PreTrainedModel)
    model.train(False)
    model.requires_grad_(False)
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars: workers have no terminal."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()

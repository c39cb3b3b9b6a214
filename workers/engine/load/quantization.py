"""Checkpoints with quantized weights: read through transformers' own quantizers, or refused.

A kind of quantization can be read if its quantizer converts the weights to plain numbers while it
loads them. The engine then converts these to its own form, as for any other model: rows of logits
stay bit-equal in any batch, and each rank takes its part. This costs memory: every rank first loads
the whole model. Activations are not quantized, even if the checkpoint asks for it.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from paceline.errors import CheckpointError
from paceline.text import one_line
from workers.engine.load.stored_tensors import StoredTensors
from workers.engine.memory import check_room

_KEY = "quantization_config"
_one_at_a_time = threading.Lock()
"""transformers' loader is not thread-safe: two that run at once report tied weights as missing."""

READABLE: Mapping[str, str | None] = {"fp8": None, "compressed-tensors": "compressed_tensors"}
"""The readable kinds, by transformers' `quant_method`, and the extra package that each needs."""

REFUSED: Mapping[str, str] = {
    "bitsandbytes": "its weights are unpacked in its own modules at each step",
    "torchao": "its quantizer does not turn weights back into numbers while it loads",
    "gptq": "its weights are unpacked by kernels for GPUs at each step",
    "awq": "its weights are unpacked by kernels for GPUs at each step",
    "mxfp4": "its models attend in a way that is not supported here",
}
"""Why these kinds are refused. Other kinds are refused because they have not been examined."""


def check_quantization(folder: Path, raw: Mapping[str, Any]) -> None:
    """Raise CheckpointError if `raw`, a config.json, names a kind that cannot be read."""
    if _KEY not in raw:
        return
    kind = str(dict(raw[_KEY] or {}).get("quant_method", "of an unknown kind"))
    if kind not in READABLE:
        reason = REFUSED.get(kind, "a kind that is not known here")
        raise CheckpointError(
            f"{folder / 'config.json'}: the weights are quantized ({kind}), which is not "
            f"supported: {reason}. Use the checkpoint in float32, bfloat16 or float16 "
            f'(target.dtype = "int8" makes it small on a CPU), or quantized as '
            f"one of {', '.join(READABLE)}"
        )
    package = READABLE[kind]
    if package is not None and importlib.util.find_spec(package) is None:
        raise CheckpointError(
            f"{folder / 'config.json'}: the weights are quantized ({kind}), for which transformers "
            f"needs the package {package}: pip install 'paceline-server[quantized]'"
        )


def plain_config(folder: Path) -> PreTrainedConfig:
    """The configuration with which transformers converts quantized weights to plain ones.

    Raises what AutoConfig raises.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    assert isinstance(config, PreTrainedConfig)
    given = getattr(config, _KEY, None)
    if given is not None:
        setattr(config, _KEY, dict(given) | {"dequantize": True})
    return config


def without_quantization(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the model with plain weights; `config` is not changed."""
    plain = deepcopy(config)
    if hasattr(plain, _KEY):
        delattr(plain, _KEY)
    return plain


def is_quantized(config: PreTrainedConfig) -> bool:
    """Whether the files hold quantized weights."""
    return getattr(config, _KEY, None) is not None


def dequantized_tensors(folder: Path, dtype: torch.dtype) -> StoredTensors:
    """The plain weights of a quantized checkpoint, all in memory until they are closed.

    Raises CheckpointError, and ConfigError if the host has too little memory.
    """
    return StoredTensors(folder, _load(folder, dtype))


def _load(folder: Path, dtype: torch.dtype) -> Mapping[str, Tensor]:
    config = plain_config(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(without_quantization(config))
    count = sum(parameter.numel() for parameter in model.parameters())
    check_room(
        count * dtype.itemsize,
        f"the quantized weights, turned into {dtype}, take",
        "take a larger host, or a checkpoint that is not quantized",
    )
    transformers_logging.disable_progress_bar()  # workers have no terminal
    loader: Any = AutoModelForCausalLM
    try:
        with _one_at_a_time:
            model, report = loader.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except Exception as error:  # transformers raises many kinds
        raise CheckpointError(f"{folder} could not be loaded: {one_line(error)}") from error
    for what in ("missing_keys", "mismatched_keys", "error_msgs"):
        if report.get(what):
            raise CheckpointError(
                f"{folder} does not hold what its config.json says, {what.replace('_', ' ')}: "
                f"{', '.join(sorted(map(str, report[what])))}; fetch it again"
            )
    tensors: Mapping[str, Tensor] = model.state_dict()
    return tensors

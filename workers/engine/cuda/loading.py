"""Loads a checkpoint, or a rank's part of one, onto one device, in a floating-point dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from paceline.errors import CheckpointError, ConfigError
from workers.engine import attention
from workers.engine.load.checkpoint import CheckpointInfo, read_config, sliding_window_of
from workers.engine.load.quantization import plain_config
from workers.engine.load.weight_form import Dtype
from workers.engine.model import empty_part, join_ranks
from workers.engine.parallel.group import Group
from workers.engine.parallel.rank_parts import Progress

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_of(asked: Dtype, info: CheckpointInfo) -> torch.dtype:
    """The dtype to load in. "auto" is the checkpoint's.

    Raises CheckpointError if the checkpoint is stored in another type than these, ConfigError if
    `asked` is another type.
    """
    if asked == "auto":
        if info.dtype not in _DTYPES:
            raise CheckpointError(
                f"{info.name} is stored as {info.dtype}; on a GPU expected {', '.join(_DTYPES)}: "
                "say which in target.dtype"
            )
        return _DTYPES[info.dtype]
    if asked not in _DTYPES:
        raise ConfigError(
            f"target.dtype {asked} is for CPUs; on a GPU use {', '.join(_DTYPES)}, or auto"
        )
    return _DTYPES[asked]


def load_on_device(folder: Path, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Hugging Face's model with paged attention.

    Raises CheckpointError, also for layers that a GPU's attention does not support. Raises
    ConfigError, with the numbers, if the device has too little memory.
    """
    _check_attention(folder)
    attention.register()
    arguments: dict[str, Any] = {} if device.type == "cpu" else {"device_map": {"": device}}
    transformers_logging.disable_progress_bar()  # workers have no terminal
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            config=plain_config(folder),
            dtype=dtype,
            attn_implementation=attention.NAME,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            **arguments,
        )
    except torch.OutOfMemoryError as error:
        raise _out_of_memory(folder, device, dtype) from error
    except Exception as error:  # transformers raises many kinds
        raise CheckpointError(f"{folder} could not be loaded: {error}") from error
    assert isinstance(model, PreTrainedModel)
    model.train(False)
    model.requires_grad_(False)
    return model


def load_part_on_device(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    group: Group,
    progress: Progress | None = None,
) -> PreTrainedModel:
    """This rank's part of the model. It reads only the rank's slices of the files.

    Raises as load_on_device does, and ConfigError if there are more ranks than heads.
    """
    _check_attention(folder)
    model, parts, sharding = empty_part(folder, group, dtype, device=device)
    parts.tell(progress, dtype)
    try:
        for module in list(model.modules()):
            parts.fill(module, dtype)
        nn.Module.to(model, device)  # buffers that the model computed for itself
    except torch.OutOfMemoryError as error:
        raise _out_of_memory(folder, device, dtype) from error
    parts.close()
    join_ranks(model, sharding, group)
    return model


def _check_attention(folder: Path) -> None:
    """Refuse layers that a GPU's attention does not support."""
    config = read_config(folder)
    window, softcap = sliding_window_of(config), getattr(config, "attn_logit_softcapping", None)
    if window is not None or softcap is not None:
        raise CheckpointError(
            f"{folder / 'config.json'}: sliding_window {window} and attn_logit_softcapping "
            f"{softcap} are not supported on a GPU: run it on CPUs"
        )


def _out_of_memory(folder: Path, device: torch.device, dtype: torch.dtype) -> ConfigError:
    free, total = torch.cuda.mem_get_info(device)
    return ConfigError(
        f"out of GPU memory while {folder.name} was loaded as {dtype}: {free} of {total} bytes "
        "are free; raise tensor_parallel, or take a larger GPU"
    )

"""What a student has learned, as files: the tensors that are not the target's own.

A student shares its target's embedding and LM head, so only its layers, its last norm and its mask
token are stored (`learned-N.safetensors`), beside `distilled.json`, which says what they belong to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from workers.distillation.training import save_whole

DESCRIPTION = "distilled.json"
_SCALE = ":scale"
_FILE_BYTES = 15 << 20


def write_learned(
    folder: Path, tensors: Mapping[str, Tensor], description: Mapping[str, Any], *, bits: int
) -> None:
    """Write `tensors` in float16, or their matrices in 8 bits with a scale for each row.

    Raises DistillationError if the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        weight = tensor.detach().float().cpu()
        if bits == 8 and weight.dim() == 2:
            scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
            stored[name] = (weight / scale).round().to(torch.int8)
            stored[name + _SCALE] = scale
        else:
            stored[name] = weight.to(torch.float16).contiguous()
    parts: list[dict[str, Tensor]] = [{}]
    for name, tensor in stored.items():
        if sum(one.nbytes for one in parts[-1].values()) + tensor.nbytes > _FILE_BYTES:
            parts.append({})
        parts[-1][name] = tensor
    for number, part in enumerate(parts, 1):
        save_whole(
            folder / f"learned-{number}.safetensors",
            lambda path, part=part: save_file(part, path),  # type: ignore[misc]
        )
    text = json.dumps({**description, "files": len(parts)}, indent=1)
    save_whole(folder / DESCRIPTION, lambda path: path.write_text(text + "\n"))


def read_learned(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors in float32, and the description."""
    description = json.loads((folder / DESCRIPTION).read_text())
    stored: dict[str, Tensor] = {}
    for number in range(1, description["files"] + 1):
        stored |= load_file(folder / f"learned-{number}.safetensors")
    tensors = {
        name: tensor.float() * stored.get(name + _SCALE, 1.0)
        for name, tensor in stored.items()
        if not name.endswith(_SCALE)
    }
    return tensors, description

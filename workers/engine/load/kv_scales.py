"""The scales of a checkpoint for float8 KV: what stored keys and values are multiplied by.

They were measured when the checkpoint was quantized. A layer has one number for its keys and one
for its values, or one per key/value head. Programs write them under different names:

    k_scale, v_scale of self_attn, or of its attn, k_proj and v_proj
    output_scale of k_proj and v_proj (older compressed-tensors)
    kv_scale of self_attn: both

Shapes: L layers, H key/value heads.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from workers.engine.load.quantization import KEY
from workers.engine.load.stored_files import Stored
from workers.engine.load.stored_tensors import StoredTensors

_NAME = re.compile(
    r"(?:^|\.)layers\.(?P<layer>\d+)\.self_attn\.(?:"
    r"(?:attn\.|k_proj\.|v_proj\.|qkv_proj\.)?(?P<side>[kv]|kv)_scale"
    r"|(?P<proj>[kv])_proj\.output_scale)$"
)
_DTYPES = ("F32", "F16", "BF16")


def read_kv_scales(
    stored: StoredTensors,
    folder: Path,
    *,
    num_layers: int,
    num_heads: int,
    held: Sequence[int | None],
) -> Tensor | None:
    """The scales of a rank's heads, float32 [L, 2, H], keys before values; None: there are none.

    `num_heads`: of the whole model. `held`: the rank's heads; None stands for padding, whose scale
    is 1. Raises CheckpointError if some layers have scales and others have none, if a scale is not
    a positive number, or if they were made for another form of KV than float8.
    """
    found: dict[tuple[int, int], Stored] = {}
    for name, tensor in stored.items():
        if (match := _NAME.search(name)) is not None:
            for side in match["side"] or match["proj"]:
                found[int(match["layer"]), "kv".index(side)] = tensor
    if not found:
        return None
    _check_scheme(folder)
    scales_L2H = torch.ones(num_layers, 2, len(held))
    for layer in range(num_layers):
        for side in (0, 1):
            scale = found.get((layer, side))
            if scale is None:
                which = ("keys", "values")[side]
                raise CheckpointError(
                    f"{folder} has scales for float8 KV, but none for the {which} of layer "
                    f'{layer}: fetch it again, or use kv_cache_dtype = "auto"'
                )
            values = _values(stored, scale, num_heads)
            for at, head in enumerate(held):
                if head is not None:
                    scales_L2H[layer, side, at] = values[head]
    return scales_L2H


def _values(stored: StoredTensors, tensor: Stored, num_heads: int) -> list[float]:
    """One number for each head."""
    if tensor.dtype not in _DTYPES or math.prod(tensor.shape) not in (1, num_heads):
        raise CheckpointError(
            f"a scale for KV in {tensor.path} is {tensor.dtype} of shape {tensor.shape}, expected "
            f"one number, or one for each of {num_heads} heads, as {', '.join(_DTYPES)}"
        )
    values: list[float] = stored.whole(tensor).to("cpu", torch.float32).flatten().tolist()
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise CheckpointError(
            f"a scale for KV in {tensor.path} is {min(values)}, expected a positive number: fetch "
            'it again, or use kv_cache_dtype = "auto"'
        )
    return values * num_heads if len(values) == 1 else values


def _check_scheme(folder: Path) -> None:
    """Refuse scales of another form than float8 without zero points."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    scheme = dict(raw.get(KEY) or {}).get("kv_cache_scheme")
    if not isinstance(scheme, dict):  # none, or only that scales are static
        return
    kind = (scheme.get("type", "float"), scheme.get("num_bits", 8), scheme.get("symmetric", True))
    if kind != ("float", 8, True):
        raise CheckpointError(
            f"{folder / 'config.json'}: its kv_cache_scheme is {kind[0]} of {kind[1]} bits, "
            f"{'' if kind[2] else 'not '}symmetric; expected symmetric float of 8 bits: use "
            'kv_cache_dtype = "auto"'
        )

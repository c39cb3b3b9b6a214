"""Loads a checkpoint's model, or a rank's part of it, into Hugging Face's own model code.

The model is built without weights (on torch's meta device). Then the weights of its modules are
read one by one. On a CPU each linear is converted to the engine's form before the next one is read,
so the whole model never exists twice. On a GPU float8 weights stay as they are stored, if the
device can multiply by them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.errors import CheckpointError, ConfigError
from paceline.text import one_line
from workers.engine.cpu.linears import (
    activation_dtype,
    holds_experts,
    replace_experts_of,
    replace_linears_of,
)
from workers.engine.cpu.native import runs_natively
from workers.engine.forward import ATTENTION, register_attention
from workers.engine.load.checkpoint import (
    CheckpointInfo,
    open_tensors,
    read_config,
    sliding_window_of,
    whole_shapes,
)
from workers.engine.load.quantization import KEY
from workers.engine.load.stored_files import Stored
from workers.engine.load.stored_tensors import StoredTensors
from workers.engine.memory import check_room, num_kv_heads_of
from workers.engine.modules import (
    ProjectionPart,
    join_projections,
    replace_activations,
    replace_norms,
)
from workers.engine.options import BITS_OF_A_WEIGHT, Dtype, WeightForm
from workers.engine.parallel.group import RankGroup
from workers.engine.parallel.sharding import Progress, RankParts, Sharding, join_ranks
from workers.engine.parallel.weight_cuts import Place

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_DTYPES_ON_GPU = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_on_cpu(
    folder: Path,
    weights: WeightForm,
    group: RankGroup | None = None,
    progress: Progress | None = None,
    *,
    kv_bytes: int = 0,
    head_rows: Sequence[int] | None = None,
) -> PreTrainedModel:
    """The model, or with a `group` the rank's part, with paged attention and our own modules.

    `kv_bytes`: the size of its KV, for which there must be room too. `head_rows`: the tokens of
    which the LM head computes logits, in this order; None: all. Raises CheckpointError; raises
    ConfigError if there are more ranks than heads, or too little memory.
    """
    # Quantized forms are made from float32, the most precise weights.
    read_as = torch.bfloat16 if weights == "bfloat16" else torch.float32
    model, parts, sharding = empty_part(folder, group)
    parts.report_to(progress, activation_dtype(weights))
    weight_bytes = parts.num_weights * BITS_OF_A_WEIGHT[weights] // 8
    check_weights_room(weight_bytes, weights, kv_bytes)
    native = (group is None or group.place.degree == 1) and runs_natively(model.config, weights)
    with closing(parts):
        _fill_and_convert(model, parts, weights, read_as, native=native, head_rows=head_rows)
    if group is not None and group.place.degree > 1:
        join_ranks(model, sharding, group)
    replace_activations(model)
    replace_norms(model)
    return model


def check_weights_room(weight_bytes: int, weights: WeightForm, kv_bytes: int) -> None:
    """Raise ConfigError if the host has too little memory for weights and KV."""
    check_room(
        weight_bytes,
        f"this shard's weights as {weights} take",
        "take a target.dtype of fewer bytes, a larger host, or more hosts and a shard on each "
        "(target.tensor_parallel)",
    )
    check_room(
        weight_bytes + kv_bytes,
        f"this shard's weights as {weights} ({weight_bytes} bytes) and its KV together take",
        "lower target.kv_memory",
    )


def _fill_and_convert(
    model: PreTrainedModel,
    parts: RankParts,
    weights: WeightForm,
    read_as: torch.dtype,
    *,
    native: bool,
    head_rows: Sequence[int] | None,
) -> None:
    """Fill an empty model, and convert its linears and experts, one by one.

    `read_as`: the dtype of the weights that are converted. `native`: convert linears for our own
    kernels. `head_rows`: as in `load_on_cpu`. Raises CheckpointError.
    """
    # Linears and experts are filled with their parents. Each is freed when it has been replaced.
    for module in [one for one in model.modules() if not _is_converted(one)]:
        parts.fill(module, activation_dtype(weights))
        for experts in filter(holds_experts, list(module.children())):
            parts.fill(experts, read_as)
            replace_experts_of(module, weights)
        linears = [child for child in module.children() if isinstance(child, nn.Linear)]
        for linear in linears:
            parts.fill(linear, read_as)
            if module is model and head_rows is not None:
                _keep_rows(linear, head_rows)
        if linears:
            join_projections(module)
            joined = {c.shared for c in module.children() if isinstance(c, ProjectionPart)}
            for holder in (module, *joined):
                replace_linears_of(holder, weights, is_head=module is model, native=native)


def _keep_rows(linear: nn.Linear, rows: Sequence[int]) -> None:
    index, linear.out_features = torch.tensor(rows), len(rows)
    linear.weight = nn.Parameter(linear.weight[index], requires_grad=False)
    if linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias[index], requires_grad=False)


def _is_converted(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or holds_experts(module)


def dtype_on_gpu(asked: Dtype, info: CheckpointInfo) -> torch.dtype:
    """The dtype in which a GPU holds a model; "auto" means the checkpoint's.

    Raises CheckpointError if a GPU does not support the checkpoint's, ConfigError if it does not
    support `asked`.
    """
    if asked == "auto":
        if info.dtype not in _DTYPES_ON_GPU:
            raise CheckpointError(
                f"{info.name} is stored as {info.dtype}; on a GPU expected one of "
                f"{', '.join(_DTYPES_ON_GPU)}: set one in target.dtype"
            )
        return _DTYPES_ON_GPU[info.dtype]
    if asked not in _DTYPES_ON_GPU:
        raise ConfigError(
            f"target.dtype {asked} is for CPUs; on a GPU use {', '.join(_DTYPES_ON_GPU)}, or auto"
        )
    return _DTYPES_ON_GPU[asked]


def load_on_gpu(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    group: RankGroup | None = None,
    progress: Progress | None = None,
    *,
    keep_fp8: bool = False,
) -> PreTrainedModel:
    """The model, or with a `group` this rank's part, on one device, with paged attention.

    Of the files, only the parts for this rank are read. `keep_fp8`: float8 weights stay float8
    where the device can multiply by them; else they become `dtype`. Tests pass a CPU as `device`.
    Raises CheckpointError, also for layers that a GPU's attention does not support. Raises
    ConfigError, with the numbers, if the device has too little memory or there are more ranks than
    heads.
    """
    _check_attention(folder)
    model, parts, sharding = empty_part(folder, group, device=device)
    parts.report_to(progress, dtype)
    try:
        with closing(parts):
            _fill(model, parts, dtype, keep_fp8=keep_fp8)
        nn.Module.to(model, device)  # moves the buffers, which the model itself has computed
    except torch.OutOfMemoryError as error:
        raise _out_of_memory(folder, device, dtype) from error
    if group is not None:
        join_ranks(model, sharding, group)
    return model


def _fill(model: PreTrainedModel, parts: RankParts, dtype: torch.dtype, *, keep_fp8: bool) -> None:
    """Fill an empty model; float8 linears become modules of their own."""
    from workers.engine.cuda.linears import Fp8Linear, can_multiply

    multiplies: dict[tuple[torch.Size, torch.Size], bool] = {}
    for module in list(model.modules()):
        for name, linear in list(module.named_children()):
            if type(linear) is not nn.Linear:
                continue
            weight = parts.read_fp8(linear) if keep_fp8 else None
            if weight is not None:
                kind = (weight.steps_MN.shape, weight.scales.shape)
                if kind not in multiplies:
                    multiplies[kind] = can_multiply(weight, dtype)
            if weight is None or not multiplies[kind]:
                parts.fill(linear, dtype)
                continue
            parts.fill(linear, dtype, skip="weight")
            bias: Tensor | None = linear.bias
            setattr(module, name, Fp8Linear(weight, bias, dtype))
        if type(module) is not nn.Linear:
            parts.fill(module, dtype)


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


def empty_part(
    folder: Path, group: RankGroup | None, *, device: torch.device | None = None
) -> tuple[PreTrainedModel, RankParts, Sharding]:
    """A rank's model without weights, the RankParts that fill it on `device` (None: the CPU), and
    its Sharding.

    Raises CheckpointError; raises ConfigError if there are more ranks than heads.
    """
    config = read_config(folder)
    stored = open_tensors(folder, device)
    shapes = whole_shapes(folder, config, stored)
    place = Place() if group is None else group.place
    sharding = Sharding(config, _base_prefix(config), place)
    model = _empty_model(sharding.local_config())
    return model, RankParts(model, stored, shapes, sharding), sharding


def part_config(folder: Path, place: Place) -> PreTrainedConfig:
    """The configuration of a rank's part. Loads no weights.

    Raises CheckpointError if the architecture cannot be cut, ConfigError if there are more ranks
    than heads.
    """
    config = read_config(folder)
    return Sharding(config, _base_prefix(config), place).local_config()


def kv_scales_of(folder: Path, place: Place) -> Tensor | None:
    """The checkpoint's scales for float8 KV of a rank's heads, on the CPU.

    Raises CheckpointError and ConfigError as `read_kv_scales` and `part_config` do.
    """
    config = read_config(folder)
    with closing(open_tensors(folder)) as stored:
        return read_kv_scales(
            stored,
            folder,
            num_layers=int(config.num_hidden_layers),
            num_heads=num_kv_heads_of(config),
            held=Sharding(config, _base_prefix(config), place).kv_heads,
        )


def _base_prefix(config: PreTrainedConfig) -> str:
    from transformers import AutoModelForCausalLM

    kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
    return str(kind.base_model_prefix)


def _empty_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The model without weights, but with the buffers that model code computes."""
    from transformers import AutoModelForCausalLM, PreTrainedModel

    register_attention()
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=ATTENTION, dtype=torch.float32
            )
    except Exception as error:  # transformers raises many kinds
        raise CheckpointError(f"the model cannot be built: {one_line(error)}") from error
    assert isinstance(model, PreTrainedModel)
    model.train(False)
    model.requires_grad_(False)
    with torch.no_grad():
        for module in model.modules():
            empty = {name: b for name, b in module.named_buffers(recurse=False) if b.is_meta}
            for name, buffer in empty.items():
                setattr(module, name, torch.empty_like(buffer, device="cpu"))
            if empty:
                model._init_weights(module)
    return model


_KV_SCALE = re.compile(
    r"(?:^|\.)layers\.(?P<layer>\d+)\.self_attn\.(?:"
    r"(?:attn\.|k_proj\.|v_proj\.|qkv_proj\.)?(?P<side>[kv]|kv)_scale"
    r"|(?P<proj>[kv])_proj\.output_scale)$"
)
"""Programs write scales for float8 KV as k_scale and v_scale of self_attn, or of its attn, k_proj
and v_proj; as output_scale of k_proj and v_proj; or as kv_scale of self_attn, for both.
"""
_KV_SCALE_DTYPES = ("F32", "F16", "BF16")


def read_kv_scales(
    stored: StoredTensors,
    folder: Path,
    *,
    num_layers: int,
    num_heads: int,
    held: Sequence[int | None],
) -> Tensor | None:
    """The scales of a rank's heads, float32 [L, 2, H], keys before values; None: there are none.

    They were measured when the checkpoint was quantized: what stored keys and values are multiplied
    by. A layer has one number for its keys and one for its values, or one for each key/value head.
    `num_heads`: of the whole model. `held`: the rank's heads; None stands for padding, whose scale
    is 1. Raises CheckpointError if some layers have scales and others have none, if a scale is not
    a positive number, or if they were made for another form of KV than float8.
    """
    found: dict[tuple[int, int], Stored] = {}
    for name, tensor in stored.items():
        if (match := _KV_SCALE.search(name)) is not None:
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
    if tensor.dtype not in _KV_SCALE_DTYPES or math.prod(tensor.shape) not in (1, num_heads):
        raise CheckpointError(
            f"a scale for KV in {tensor.path} is {tensor.dtype} of shape {tensor.shape}, expected "
            f"one number, or one for each of {num_heads} heads, as {', '.join(_KV_SCALE_DTYPES)}"
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

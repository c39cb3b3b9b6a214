"""What config.json says about quantized weights: how they are stored, or why they are refused.

Checkpoints of a readable kind are unpacked by our own code (packed_weights.py) while they are read.
So each rank reads and unpacks its part alone, and no host ever holds the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError
from workers.engine.load.packed_weights import Packing

KEY = "quantization_config"

READABLE = ("fp8", "compressed-tensors", "awq", "gptq")
"""The readable kinds, by transformers' `quant_method`."""

REFUSED: Mapping[str, str] = {
    "bitsandbytes": "its weights are unpacked in its own modules at each step",
    "torchao": "its files hold tensors of its own classes",
    "mxfp4": "its models attend in a way that is not supported here",
}
"""Why these kinds are refused. Other kinds are refused because they have not been examined."""

_COMPRESSED_FORMATS = {
    "float-quantized": "plain",
    "int-quantized": "plain",
    "naive-quantized": "plain",
    "pack-quantized": "packed",
}


def packing_of(folder: Path, raw: Mapping[str, Any]) -> Packing | None:
    """How the weights are stored, from `raw`, a config.json; None: as plain numbers.

    Raises CheckpointError for a kind that cannot be read.
    """
    if KEY not in raw:
        return None
    given = dict(raw[KEY] or {})
    kind = str(given.get("quant_method", "of an unknown kind"))
    reason: str | Packing
    match kind:
        case "fp8":
            reason = _of_fp8(given)
        case "compressed-tensors":
            reason = _of_compressed(given)
        case "awq":
            reason = _of_awq(given)
        case "gptq":
            reason = _of_gptq(given)
        case _:
            reason = REFUSED.get(kind, "a kind that is not known here")
    if isinstance(reason, Packing):
        return reason
    raise CheckpointError(
        f"{folder / 'config.json'}: the weights are quantized ({kind}), which is not "
        f"supported: {reason}. Use the checkpoint in float32, bfloat16 or float16 "
        f'(target.dtype = "int8" makes it small on a CPU), or quantized as '
        f"one of {', '.join(READABLE)}"
    )


def _of_fp8(given: Mapping[str, Any]) -> Packing | str:
    if given.get("scale_fmt", "float") != "float":
        return f"its scales are stored as {given['scale_fmt']}, expected float"
    if given.get("expert_dtype", "fp8") != "fp8":
        return f"its experts are stored as {given['expert_dtype']}, expected fp8"
    block = given.get("weight_block_size")
    if block is not None and not _is_pair(block):
        return f"weight_block_size is {block!r}, expected two numbers"
    sizes = (None, None) if block is None else (int(block[0]), int(block[1]))
    return Packing("plain", block=sizes, quantizes_rows=True)


def _of_compressed(given: Mapping[str, Any]) -> Packing | str:
    format_name = str(given.get("format", "dense"))
    layout = _COMPRESSED_FORMATS.get(format_name)
    if layout is None:
        expected = ", ".join(_COMPRESSED_FORMATS)
        return f"its format is {format_name}, expected one of {expected}"
    if given.get("transform_config"):
        return "its transform_config rotates activations at each step"
    if dict(given.get("sparsity_config") or {}).get("format", "dense") != "dense":
        return "its weights are also stored as sparse ones (sparsity_config)"
    schemes = [dict(group) for group in dict(given.get("config_groups") or {}).values()]
    weights = [dict(scheme.get("weights") or {}) for scheme in schemes]
    read = ("num_bits", "type", "strategy", "group_size", "block_structure")
    kinds = {tuple(str(one.get(field)) for field in read) for one in weights}
    if len(kinds) != 1:
        return f"its config_groups store weights in {len(kinds)} ways, expected one"
    bits, group = int(weights[0].get("num_bits", 8)), weights[0].get("group_size")
    if (layout == "plain" and bits != 8) or bits not in (2, 4, 8):
        return f"its weights have {bits} bits as {format_name}; expected 8, or packed 2, 4 or 8"
    block = weights[0].get("block_structure")
    if block is not None and not _is_pair(block):
        return f"block_structure is {block!r}, expected two numbers"
    sizes: tuple[int | None, int | None] = (None, int(group) if group and group > 0 else None)
    if block is not None:
        sizes = (int(block[0]), int(block[1]))
    activations = [dict(scheme.get("input_activations") or {}) for scheme in schemes]
    is_float8 = all((one.get("type"), one.get("num_bits")) == ("float", 8) for one in activations)
    return Packing(
        "plain" if layout == "plain" else "packed",
        bits,
        sizes,
        quantizes_rows=is_float8,
        has_zeros=not weights[0].get("symmetric", True),
        reorders=weights[0].get("actorder") == "group",
    )


def _of_awq(given: Mapping[str, Any]) -> Packing | str:
    version = str(given.get("version") or given.get("format") or "gemm").lower()
    bits = given.get("bits", given.get("w_bit", 4))
    if version != "gemm" or bits != 4 or not given.get("zero_point", True):
        return f"its version is {version} with {bits} bits; expected gemm, 4 bits, zero points"
    return Packing("awq", 4, (1, _group_of(given)), has_zeros=True)


def _of_gptq(given: Mapping[str, Any]) -> Packing | str:
    version = str(given.get("checkpoint_format") or given.get("format") or "gptq").lower()
    bits = given.get("bits")
    if version not in ("gptq", "gptq_v2") or bits not in (2, 4, 8):
        return f"its format is {version} with {bits} bits; expected gptq or gptq_v2, 2, 4 or 8 bits"
    return Packing(
        "gptq",
        bits,
        (1, _group_of(given)),
        zero_offset=int(version == "gptq"),
        has_zeros=True,
        reorders=bool(given.get("desc_act")),
    )


def _group_of(given: Mapping[str, Any]) -> int | None:
    """The inputs that share a scale; None: all."""
    size = int(given.get("group_size", given.get("q_group_size", 128)))
    return size if size > 0 else None


def _is_pair(block: object) -> bool:
    return (
        isinstance(block, Sequence)
        and len(block) == 2
        and all(isinstance(size, int) and size > 0 for size in block)
    )

"""Checkpoints with quantized weights in the layouts that other programs write, made in the test.

Every maker takes random steps, packs them number by number as the format says, and tells the plain
weights, which it computes from the steps and not from what it packed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny import make_tiny_checkpoint

WEIGHTS = "model.safetensors"
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output whose step is in the first four bits of a word, in the next four, and so on."""
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Kind:
    """`pack` maps a linear's random generator and shape (M, N) to stored tensors by leaf, and the
    plain weight.
    """

    quantization: Mapping[str, Any]
    pack: Callable[[np.random.Generator, int, int], tuple[Tensors, Tensor]]


def words_of(steps: np.ndarray[Any, Any], bits: int, order: tuple[int, ...]) -> Tensor:
    """Pack steps [R, C] along C; the number in place i of a word is number order[i] of its run."""
    rows, columns = steps.shape
    per = len(order)
    words = np.zeros((rows, columns // per), dtype=np.uint32)
    for row in range(rows):
        for column in range(columns // per):
            word = 0
            for place, number in enumerate(order):
                word |= int(steps[row, column * per + number]) << (bits * place)
            words[row, column] = word
    return torch.from_numpy(words.view(np.int32).copy())


def plain_of(
    steps: np.ndarray[Any, Any], zeros: np.ndarray[Any, Any], scales: Tensor, groups: list[int]
) -> Tensor:
    """Weights [M, N] of steps [M, N], zeros [M, G] and scales [M, G]; a group for each input."""
    weight = torch.empty(steps.shape)
    for output in range(steps.shape[0]):
        for number, group in enumerate(groups):
            step = int(steps[output, number]) - int(zeros[output, group])
            weight[output, number] = step * scales[output, group].float()
    return weight


def _scales(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.uniform(0.002, 0.01, shape)).to(torch.float16)


def _awq(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, Tensor]:
    size, count = 16, inputs // 16
    steps = rng.integers(0, 16, (outputs, inputs))
    zeros, scales = rng.integers(0, 16, (outputs, count)), _scales(rng, outputs, count)
    stored = {
        "qweight": words_of(steps.T, 4, AWQ_ORDER),
        "qzeros": words_of(zeros.T, 4, AWQ_ORDER),
        "scales": scales.t().contiguous(),
    }
    return stored, plain_of(steps, zeros, scales, [n // size for n in range(inputs)])


def gptq(bits: int, *, act_order: bool, version: str) -> Kind:
    size = 16

    def pack(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, Tensor]:
        order, count = tuple(range(32 // bits)), inputs // size
        steps = rng.integers(0, 1 << bits, (outputs, inputs))
        zeros = rng.integers(0, 1 << bits, (outputs, count))
        groups = [n // size for n in range(inputs)]
        if act_order:
            rng.shuffle(groups)
        scales = _scales(rng, outputs, count)
        less = (zeros - (version == "gptq")) % (1 << bits)
        stored = {
            "qweight": words_of(steps, bits, order).t().contiguous(),
            "qzeros": words_of(less.T, bits, order),
            "scales": scales.t().contiguous(),
            "g_idx": torch.tensor(groups, dtype=torch.int32),
        }
        return stored, plain_of(steps, zeros, scales, groups)

    return Kind(
        {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": size,
            "desc_act": act_order,
            "checkpoint_format": version,
        },
        pack,
    )


def packed(bits: int, *, symmetric: bool) -> Kind:
    """compressed-tensors' pack-quantized: groups of inputs, zeros packed along the outputs."""
    size = 16

    def pack(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, Tensor]:
        order, middle = tuple(range(32 // bits)), 1 << (bits - 1)
        steps = rng.integers(0, 1 << bits, (outputs, inputs))
        zeros = rng.integers(0, 1 << bits, (outputs, inputs // size))
        if symmetric:
            zeros = np.full_like(zeros, middle)
        scales = _scales(rng, outputs, inputs // size)
        stored = {
            "weight_packed": words_of(steps, bits, order),
            "weight_scale": scales,
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        if not symmetric:
            stored["weight_zero_point"] = words_of(zeros.T, bits, order).t().contiguous()
        return stored, plain_of(steps, zeros, scales, [n // size for n in range(inputs)])

    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group"}
    return Kind(_compressed("pack-quantized", weights | {"group_size": size}), pack)


def float8(strategy: str, method: str = "compressed-tensors", block: int = 128) -> Kind:
    """float8 by "tensor", "channel" or "block", as `method` writes it."""
    leaf = "weight_scale" if method == "compressed-tensors" else "weight_scale_inv"

    def pack(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, Tensor]:
        steps = torch.from_numpy(rng.normal(0, 60, (outputs, inputs))).to(torch.float8_e4m3fn)
        shape = {
            "tensor": (1,),
            "channel": (outputs, 1),
            "block": (-(-outputs // block), -(-inputs // block)),
        }[strategy]
        scales = torch.from_numpy(rng.uniform(0.0003, 0.001, shape)).float()
        plain = torch.empty(outputs, inputs)
        for row in range(outputs):
            for column in range(inputs):
                at = {"tensor": (0,), "channel": (row, 0), "block": (row // block, column // block)}
                plain[row, column] = steps[row, column].float() * scales[at[strategy]]
        return {"weight": steps, leaf: scales}, plain

    if method == "fp8":
        size = None if strategy == "tensor" else [block, block]
        return Kind({"quant_method": "fp8", "weight_block_size": size}, pack)
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": strategy}
    if strategy == "block":
        weights["block_structure"] = [block, block]
    return Kind(_compressed("float-quantized", weights, {"num_bits": 8, "type": "float"}), pack)


def _compressed(name: str, weights: Any, activations: Any = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


KINDS: Mapping[str, Kind] = {
    "awq": Kind({"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}, _awq),
    "gptq-4": gptq(4, act_order=False, version="gptq"),
    "gptq-4-act-order": gptq(4, act_order=True, version="gptq_v2"),
    "gptq-8": gptq(8, act_order=False, version="gptq"),
    "packed-4": packed(4, symmetric=True),
    "packed-4-zeros": packed(4, symmetric=False),
    "packed-8": packed(8, symmetric=True),
    "float8-tensor": float8("tensor"),
    "float8-channel": float8("channel"),
    "float8-block": float8("block", block=16),
    "fp8-tensor": float8("tensor", "fp8"),
    "fp8-block": float8("block", "fp8", block=16),
}


def make_packed(folder: Path, kind: Kind, **sizes: Any) -> tuple[Path, Path]:
    """A checkpoint whose layers' linears are of this kind, and one with its plain weights."""
    made, plain = folder / "packed", folder / "plain"
    for one in (made, plain):
        make_tiny_checkpoint(one, **sizes)
    stored, weights = load_file(made / WEIGHTS), load_file(plain / WEIGHTS)
    rng = np.random.default_rng(4)
    for name in [one for one in stored if one.endswith("_proj.weight")]:
        tensors, weight = kind.pack(rng, *stored.pop(name).shape)
        module = name.removesuffix(".weight")
        stored |= {f"{module}.{leaf}": tensor for leaf, tensor in tensors.items()}
        weights[name] = weight
    save_file(stored, made / WEIGHTS, metadata={"format": "pt"})
    save_file(weights, plain / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((made / "config.json").read_text())
    config["quantization_config"] = dict(kind.quantization)
    (made / "config.json").write_text(json.dumps(config))
    return made, plain

"""Quantized checkpoints: transformers' own logits at every degree, or a refusal that says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from paceline.errors import CheckpointError
from tests.tiny import make_tiny_checkpoint
from tests.workers.engine.cuda.engines import make_engine
from tests.workers.engine.parallel.ranks import Ranks
from workers.engine.cpu.engine import CpuEngine
from workers.engine.load.checkpoint import inspect_checkpoint
from workers.engine.load.quantization import READABLE, REFUSED
from workers.engine.parallel.group import RankGroup
from workers.engine.slices import Slice

BLOCK = 16
LENGTH = 150
TOKEN_IDS = torch.randint(384, (LENGTH,), generator=torch.Generator().manual_seed(6)).tolist()
KV_BYTES = 1 << 21
SIZES: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 8}


def config_with(folder: Path, quantization: object) -> None:
    path = folder / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization})
    )


def make_fp8(folder: Path) -> Path:
    """A checkpoint with the layers' linears in scaled blocks of float8, like DeepSeek's."""
    make_tiny_checkpoint(folder, **SIZES)
    tensors = load_file(folder / "model.safetensors")
    for name in [one for one in tensors if one.endswith("_proj.weight")]:
        blocks = tensors[name].unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
        scales = blocks.abs().amax(dim=(1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        steps = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        tensors[name] = steps.reshape(tensors[name].shape)
        tensors[f"{name}_scale_inv"] = scales
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config_with(
        folder,
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": ["lm_head"],
        },
    )
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_fp8(tmp_path_factory.mktemp("fp8"))


@pytest.fixture(scope="module")
def expected_TV(folder: Path) -> torch.Tensor:
    return logits_of(folder)


def logits_of(folder: Path) -> torch.Tensor:
    """The logits that transformers itself computes."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits_TV: torch.Tensor = model(torch.tensor([TOKEN_IDS])).logits[0]
    return logits_TV


def logits_at(folder: Path, degree: int) -> torch.Tensor:
    """The logits that `degree` ranks of ours compute."""
    piece = Slice([0, 1], 0, TOKEN_IDS, LENGTH)

    def work(group: RankGroup) -> torch.Tensor:
        engine = CpuEngine(folder, threads=1, kv_memory_bytes=KV_BYTES, group=group)
        ranks.join(group)
        engine.agree()
        assert engine.batch_invariant
        return engine.step([piece])

    if degree == 1:
        return CpuEngine(folder, threads=1, kv_memory_bytes=KV_BYTES).step([piece])
    with Ranks(degree) as ranks:
        return ranks.together(work)[0]


def near(found_TV: torch.Tensor, expected_TV: torch.Tensor) -> bool:
    return bool((found_TV - expected_TV).abs().max() < 1e-5 * expected_TV.abs().max() + 1e-5)


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_logits_are_those_of_transformers(
    folder: Path, expected_TV: torch.Tensor, degree: int
) -> None:
    assert near(logits_at(folder, degree), expected_TV)


def test_the_weights_are_steps_times_scales(
    folder: Path, expected_TV: torch.Tensor, tmp_path: Path
) -> None:
    """Compares with plain weights that are written out here, and that differ from the original
    ones.
    """
    plain = make_tiny_checkpoint(tmp_path, **SIZES)
    assert not near(logits_of(plain), expected_TV)
    tensors = load_file(folder / "model.safetensors")
    for name in [one for one in tensors if one.endswith("_scale_inv")]:
        scales = tensors.pop(name).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        weight = name.removesuffix("_scale_inv")
        tensors[weight] = tensors[weight].to(torch.float32) * scales
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    assert near(logits_of(plain), expected_TV)


def test_the_engine_for_gpus_reads_them_too(folder: Path, expected_TV: torch.Tensor) -> None:
    engine = make_engine(folder, "cpu")
    assert near(engine.step([Slice([0], 0, TOKEN_IDS, LENGTH)]), expected_TV)


def test_what_a_file_lacks_is_named(tmp_path: Path) -> None:
    folder = make_fp8(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    del tensors[name], tensors[f"{name}_scale_inv"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing keys: model\.layers\.1\.mlp\.up_proj\.wei"):
        CpuEngine(folder, threads=1, kv_memory_bytes=KV_BYTES)


@pytest.mark.parametrize("kind", [*REFUSED, "quip"])
def test_other_kinds_are_refused_with_the_reason(tmp_path: Path, kind: str) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    config_with(folder, {"quant_method": kind})
    with pytest.raises(CheckpointError) as caught:
        inspect_checkpoint(folder)
    message = str(caught.value)
    assert f"the weights are quantized ({kind})" in message
    assert REFUSED.get(kind, "a kind that is not known here") in message
    assert all(readable in message for readable in READABLE)


def make_compressed(folder: Path) -> Path:
    """A checkpoint with the layers' linears in int8, scaled by row, like llm-compressor's."""
    make_tiny_checkpoint(folder, **SIZES)
    tensors = load_file(folder / "model.safetensors")
    for name in [one for one in tensors if one.endswith("_proj.weight")]:
        scales = tensors[name].abs().amax(dim=1, keepdim=True) / 127
        tensors[f"{name}_scale"] = scales
        tensors[name] = (tensors[name] / scales).round().to(torch.int8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    config_with(
        folder,
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": ["lm_head"],
        },
    )
    return folder


@pytest.mark.parametrize("degree", [1, 2])
def test_compressed_tensors(tmp_path: Path, degree: int) -> None:
    """Compares with plain weights that are written out here: steps times scales."""
    folder = make_compressed(tmp_path / "int8")
    plain = make_tiny_checkpoint(tmp_path / "plain", **SIZES)
    found_TV = logits_at(folder, degree)
    assert not near(found_TV, logits_of(plain))
    tensors = load_file(folder / "model.safetensors")
    for name in [one for one in tensors if one.endswith("_scale")]:
        scales = tensors.pop(name)
        weight = name.removesuffix("_scale")
        tensors[weight] = tensors[weight].to(torch.float32) * scales
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    assert near(found_TV, logits_of(plain))

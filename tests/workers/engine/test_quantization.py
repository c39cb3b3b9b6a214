"""Quantized checkpoints: transformers' own logits at every degree, or a refusal that says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from paceline.errors import CheckpointError
from tests.tiny import make_tiny_checkpoint
from tests.workers.engine.cuda.engines import make_engine, make_rank
from tests.workers.engine.packed_checkpoints import KINDS, WEIGHTS, make_packed
from tests.workers.engine.parallel.ranks import Ranks
from workers.engine.cpu.engine import CpuEngine
from workers.engine.cuda.linears import Fp8Linear
from workers.engine.load.checkpoint import inspect_checkpoint
from workers.engine.load.model import load_on_gpu
from workers.engine.load.packed_weights import unpack
from workers.engine.load.quantization import READABLE, REFUSED, packing_of
from workers.engine.load.stored_tensors import StoredTensors
from workers.engine.parallel.group import RankGroup
from workers.engine.parallel.weight_cuts import Cut, Span
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
    with pytest.raises(
        CheckpointError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight .* is missing"
    ):
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


@pytest.mark.parametrize("name", KINDS)
def test_stored_weights_are_the_published_numbers(tmp_path: Path, name: str) -> None:
    """Of the whole weight, and of parts of it along either dimension, bit for bit."""
    kind, shape = KINDS[name], (48, 64)
    tensors, plain = kind.pack(np.random.default_rng(1), *shape)
    save_file({f"linear.{leaf}": one for leaf, one in tensors.items()}, tmp_path / WEIGHTS)
    packing = packing_of(tmp_path, {"quantization_config": kind.quantization})
    stored = StoredTensors(tmp_path, packing)
    assert torch.equal(stored.read("linear.weight", shape, None, torch.float32), plain)
    half = stored.read("linear.weight", shape, None, torch.bfloat16)
    assert torch.equal(half, plain.to(torch.bfloat16))
    for dim in (0, 1):
        cut = Cut(dim, 20, (Span(0, 3, 7), Span(9, 30, 11)))
        expected = torch.zeros([20, 64] if dim == 0 else [48, 20])
        for span in cut.spans:
            expected.narrow(dim, span.at, span.count).copy_(
                plain.narrow(dim, span.start, span.count)
            )
        assert torch.equal(stored.read("linear.weight", shape, cut, torch.float32), expected)
    stored.close()


@pytest.mark.parametrize("bits", [4, 8])
def test_words_are_those_of_compressed_tensors(bits: int) -> None:
    low = -(1 << (bits - 1))
    steps = torch.randint(low, -low, (6, 64), dtype=torch.int8)
    words = pack_to_int32(steps, bits)
    assert torch.equal(unpack(words, bits) + low, steps.to(torch.int32))


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("name", ["awq", "gptq-4-act-order", "packed-4-zeros", "float8-channel"])
def test_logits_are_those_of_the_plain_weights(tmp_path: Path, name: str, degree: int) -> None:
    made, plain = make_packed(tmp_path, KINDS[name], **SIZES)
    original = make_tiny_checkpoint(tmp_path / "original", **SIZES)
    expected_TV = logits_of(plain)
    assert not near(logits_of(original), expected_TV)
    assert near(logits_at(made, degree), expected_TV)


def test_the_experts_of_a_mixture_are_unpacked_too(tmp_path: Path) -> None:
    made, plain = make_packed(tmp_path, KINDS["fp8-block"], architecture="qwen3_moe")
    assert near(logits_at(made, 1), logits_of(plain))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"quant_method": "awq", "version": "gemv"}, "its version is gemv"),
        ({"quant_method": "gptq", "bits": 3}, "gptq with 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "format is marlin"),
        ({"quant_method": "fp8", "scale_fmt": "ue8m0"}, "scales are stored as ue8m0"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "nvfp4"),
        (
            {**KINDS["packed-4"].quantization, "transform_config": {"R1": {}}},
            "rotates activations",
        ),
        (
            {
                **KINDS["packed-4"].quantization,
                "config_groups": {
                    "a": {"weights": {"num_bits": 4}},
                    "b": {"weights": {"num_bits": 8}},
                },
            },
            "store weights in 2 ways",
        ),
    ],
)
def test_forms_that_cannot_be_read_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(CheckpointError, match=why):
        packing_of(tmp_path, {"quantization_config": changes})


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("deepseek_v3", "multi-head latent attention"),
        ("gpt_oss", "has attention sinks"),
        ("gemma3", "reads images"),
    ],
)
def test_attention_that_cannot_run_is_refused_by_name(
    tmp_path: Path, model_type: str, why: str
) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    config = {"model_type": model_type, "num_hidden_layers": 2, "vocab_size": 384}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=why):
        inspect_checkpoint(folder)


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("name", ["float8-tensor", "float8-channel"])
def test_float8_is_multiplied_as_float8(tmp_path: Path, name: str, degree: int) -> None:
    """Near the logits of plain weights and activations, but not equal. Rows keep their bits."""
    made, plain = make_packed(tmp_path, KINDS[name], **SIZES)
    expected_TV = logits_of(plain)

    def work(group: RankGroup | None) -> tuple[torch.Tensor, torch.Tensor]:
        engine = make_rank(made, group, keep_fp8=True)
        if group is not None:
            ranks.join(group)
            engine.agree()
        whole_TV = engine.step([Slice([0], 0, TOKEN_IDS, LENGTH)])
        last = engine.step([Slice([0], LENGTH - 3, TOKEN_IDS[-3:], 3)])
        return whole_TV, last

    if degree == 1:
        whole_TV, last = work(None)
    else:
        with Ranks(degree) as ranks:
            whole_TV, last = ranks.together(work)[0]
    difference = (whole_TV - expected_TV).norm() / expected_TV.norm()
    assert 1e-4 < difference < 0.1
    # On a CPU the reference attention may round a row of a window differently.
    assert torch.allclose(last, whole_TV[-3:], rtol=0.02, atol=0.02 * float(whole_TV.abs().max()))


@pytest.mark.parametrize("degree", [1, 2])
def test_scales_that_are_given_for_activations_are_used(tmp_path: Path, degree: int) -> None:
    """The float8 products of a layer have the checkpoint's input_scale, in any part of it."""
    made, plain = make_packed(tmp_path, KINDS["float8-tensor"], **SIZES)
    tensors = load_file(made / WEIGHTS)
    names = [one for one in tensors if one.endswith("_proj.weight")]
    for scale, low, high in ((0.01, 1e-4, 0.1), (0.000001, 0.12, 10.0)):
        given = {name.replace("weight", "input_scale"): torch.tensor([scale]) for name in names}
        save_file(tensors | given, made / WEIGHTS, metadata={"format": "pt"})

        def work(group: RankGroup | None) -> torch.Tensor:
            engine = make_rank(made, group, keep_fp8=True)
            if group is not None:
                ranks.join(group)
                engine.agree()
            return engine.step([Slice([0], 0, TOKEN_IDS, LENGTH)])

        if degree == 1:
            found_TV = work(None)
        else:
            with Ranks(degree) as ranks:
                found_TV = ranks.together(work)[0]
        expected_TV = logits_of(plain)
        # With the small scale, most activations become the largest number.
        assert low < (found_TV - expected_TV).norm() / expected_TV.norm() < high
    given = {name.replace("weight", "input_scale"): torch.ones(2) for name in names}
    save_file(tensors | given, made / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"the input_scale of tensor .* expected one number"):
        inspect_checkpoint(made)


def test_float8_experts_are_unpacked_for_a_gpu(tmp_path: Path) -> None:
    """Blocks of 16 are too, so the logits are those of the plain weights."""
    made, plain = make_packed(tmp_path, KINDS["fp8-block"], architecture="qwen3_moe")
    found_TV = make_rank(made, None, keep_fp8=True).step([Slice([0], 0, TOKEN_IDS, LENGTH)])
    assert near(found_TV, logits_of(plain))


def test_a_rank_holds_its_part_of_float8_weights(tmp_path: Path) -> None:
    made, _ = make_packed(tmp_path, KINDS["float8-channel"], **SIZES)
    with Ranks(2) as ranks:
        models = ranks.together(
            lambda group: load_on_gpu(
                made, torch.device("cpu"), torch.float32, group, keep_fp8=True
            )
        )
    for model in models:
        layers = [one for one in model.modules() if isinstance(one, Fp8Linear)]
        assert len(layers) == 2 * 7
        assert all(one.weight.dtype == torch.float8_e4m3fn for one in layers)
        down = model.model.layers[0].mlp.down_proj.part
        assert down.weight.shape[1] < make_config(made)["intermediate_size"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda scale: scale[:-1], r"have shape \(63, 1\), but config.json asks for 1 or 64 x 1"),
        (lambda scale: scale.to(torch.int32), "are I32, expected one of F32"),
        (lambda scale: None, "or its scale is missing"),
    ],
)
def test_scales_that_do_not_fit_are_named(tmp_path: Path, change: Any, why: str) -> None:
    made, _ = make_packed(tmp_path, KINDS["float8-channel"], **SIZES)
    tensors = load_file(made / WEIGHTS)
    name = "model.layers.0.self_attn.q_proj.weight_scale"
    changed = change(tensors.pop(name))
    save_file(tensors if changed is None else tensors | {name: changed}, made / WEIGHTS)
    with pytest.raises(CheckpointError, match=why):
        inspect_checkpoint(made)


@pytest.mark.parametrize(
    ("kind", "leaf", "change", "why"),
    [
        ("awq", "qzeros", None, "has no zero points, expected shape"),
        (
            "gptq-4",
            "qzeros",
            lambda zero: zero[:-1],
            r"has zero points of shape \(3, 8\), expected shape \(4, 8\)",
        ),
        ("gptq-4-act-order", "g_idx", None, "has no group index, expected shape"),
        ("packed-4-zeros", "weight_zero_point", None, "has no zero points, expected shape"),
        ("packed-4", "weight_packed", lambda steps: steps.long(), "are I64, expected I32"),
    ],
)
def test_quantized_tensors_that_do_not_fit_are_named(
    tmp_path: Path, kind: str, leaf: str, change: Any, why: str
) -> None:
    """Else the weights would be other ones, without a word."""
    made, _ = make_packed(tmp_path, KINDS[kind], **SIZES)
    inspect_checkpoint(made)
    tensors = load_file(made / WEIGHTS)
    name = f"model.layers.0.self_attn.q_proj.{leaf}"
    changed = tensors.pop(name)
    save_file(tensors if change is None else tensors | {name: change(changed)}, made / WEIGHTS)
    with pytest.raises(CheckpointError, match=why):
        inspect_checkpoint(made)


def make_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config

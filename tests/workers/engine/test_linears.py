"""Packed, 8-bit and 4-bit linear layers against plain ones."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from paceline.errors import ConfigError
from tests.processor import NEEDS_BFLOAT16
from tests.tiny import make_tiny_checkpoint
from workers.engine.cpu.engine import CpuEngine
from workers.engine.cpu.linears import (
    HalfLinear,
    Int4Linear,
    Int8Linear,
    PackedLinear,
    convert_weights,
    replace_linears,
)
from workers.engine.cpu.native import quantize_channels, quantize_groups
from workers.engine.options import WeightForm
from workers.engine.slices import Slice


def make_linear(*, bias: bool) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(96, 64, bias=bias).requires_grad_(False)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 65])
def test_packed_linear_is_the_plain_one(bias: bool, rows: int) -> None:
    plain = make_linear(bias=bias)
    packed = PackedLinear(plain)
    rows_TN = torch.randn(1, rows, 96)
    assert packed(rows_TN).shape == (1, rows, 64)
    assert torch.allclose(packed(rows_TN), plain(rows_TN), atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 65])
def test_half_linear_is_the_plain_one_of_rounded_weights(bias: bool, rows: int) -> None:
    plain = make_linear(bias=bias)
    half = HalfLinear(plain)
    rows_TN = torch.randn(1, rows, 96)
    result = half(rows_TN)
    assert result.shape == (1, rows, 64)
    rounded_MN = plain.weight.half().float()
    assert torch.allclose(result, nn.functional.linear(rows_TN, rounded_MN, plain.bias), atol=1e-5)
    if rows:
        assert not torch.allclose(result, plain(rows_TN), atol=1e-6), "no weight was rounded"


def test_a_weight_beyond_float16_is_refused_with_its_size() -> None:
    plain = make_linear(bias=False)
    plain.weight[3, 4] = -70_000.0
    with pytest.raises(ConfigError, match=r"a weight of 70000 cannot be held in float16.*65504"):
        HalfLinear(plain)


def test_a_processor_without_bfloat16_is_told_what_to_set() -> None:
    """oneDNN treats this processor as one that has only AVX2."""
    program = (
        "import torch\nfrom workers.engine.cpu.linears import PackedLinear\n"
        "PackedLinear(torch.nn.Linear(96, 64), torch.float32)\n"
        "PackedLinear(torch.nn.Linear(96, 64), torch.bfloat16)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"},
        capture_output=True,
        text=True,
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith("paceline.errors.ConfigError: bfloat16 weights need a processor with")
    assert 'set target.dtype = "float16"' in last


@pytest.mark.parametrize("layer", [PackedLinear, HalfLinear])
def test_a_single_row_has_the_bits_it_has_in_company(
    layer: Callable[[nn.Linear], nn.Module],
) -> None:
    torch.manual_seed(0)
    packed = layer(nn.Linear(1536, 576).requires_grad_(False))
    rows_TN = torch.randn(40, 1536)
    together = packed(rows_TN)
    for row in range(40):
        assert torch.equal(packed(rows_TN[row : row + 1])[0], together[row])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 31, 32, 80])
def test_int8_linear_is_near_the_plain_one(bias: bool, rows: int) -> None:
    plain = make_linear(bias=bias)
    rows_TN = torch.randn(1, rows, 96)
    result = Int8Linear(plain)(rows_TN.bfloat16()).float()
    error = (result - plain(rows_TN)).norm() / plain(rows_TN).norm()
    # Rounding: 8-bit weights give about 0.005, bfloat16 activations and results 0.003.
    assert 0 < error < 0.02


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 127, 128, 200])
def test_int4_linear_computes_with_its_unpacked_weights(bias: bool, rows: int) -> None:
    plain = make_linear(bias=bias)
    rows_TN = torch.randn(1, rows, 96)
    layer = Int4Linear(plain)
    expected = nn.functional.linear(rows_TN, layer.unpacked_MN().float(), plain.bias)
    result = layer(rows_TN.bfloat16()).float()
    # bfloat16 activations and results: 0.003.
    assert (result - expected).norm() / expected.norm() < 0.01
    # 16 steps of about a quarter of a standard deviation each.
    assert 0.01 < (result - plain(rows_TN)).norm() / plain(rows_TN).norm() < 0.12


def test_weights_that_have_4_bits_keep_their_steps() -> None:
    generator = torch.Generator().manual_seed(0)
    steps_MN = torch.randint(16, (8, 64), generator=generator)
    steps_MN[:, ::32], steps_MN[:, 1::32] = 0, 15  # a group reaches both ends of its range
    scale_MG1 = torch.rand(8, 2, 1, generator=generator) / 10
    minimum_MG1 = torch.rand(8, 2, 1, generator=generator) - 0.5
    weight_MN = (steps_MN.unflatten(1, (2, 32)) * scale_MG1 + minimum_MG1).flatten(1)
    found_MN, scale_MG, minimum_MG = quantize_groups(weight_MN)
    assert torch.equal(found_MN.long(), steps_MN)
    # Both are rounded to bfloat16, 8 bits; the range carries the minimum's rounding too.
    assert torch.allclose(scale_MG.float(), scale_MG1[..., 0], rtol=2**-8, atol=2**-9 / 15)
    assert torch.allclose(minimum_MG.float(), minimum_MG1[..., 0], rtol=2**-8)


def test_quantized_weights_are_within_half_a_step() -> None:
    weight_MN = make_linear(bias=False).weight
    weight_MN[3] = 0
    steps_MN, scale_M = quantize_channels(weight_MN)
    assert steps_MN.dtype == torch.int8
    restored_MN = steps_MN.float() * scale_M.float()[:, None]
    # Half a step, and what rounding the scale to bfloat16 (2^-9) clips from the largest weight.
    bound_M = scale_M.float() * (0.5 + 127 * 2**-8)
    assert ((restored_MN - weight_MN).abs() <= bound_M[:, None]).all()
    assert (restored_MN[3] == 0).all()


def test_no_plain_linear_is_left_and_a_tied_embedding_keeps_its_weight(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    embedding = model.get_input_embeddings().get_parameter("weight").clone()
    replace_linears(model, "float32")
    assert not [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert isinstance(model.lm_head, PackedLinear)
    assert torch.equal(model.get_input_embeddings().get_parameter("weight"), embedding)


@pytest.mark.parametrize(
    "form", [pytest.param("bfloat16", marks=NEEDS_BFLOAT16), "float16", "int8", "int4"]
)
def test_the_peers_converted_model_has_the_engines_weights(
    tmp_path: Path, form: WeightForm
) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    engine = CpuEngine(folder, weights=form, threads=1, kv_memory_bytes=1 << 20)
    peer = AutoModelForCausalLM.from_pretrained(folder)
    convert_weights(peer, form)
    token_ids = torch.randint(384, (20,), generator=torch.Generator().manual_seed(2)).tolist()
    ours = engine.step([Slice([0], 0, token_ids, 20)])
    with torch.no_grad():
        theirs = peer(torch.tensor([token_ids])).logits[0].float()
    assert ours.dtype == torch.float32
    # bfloat16 has 8 bits; attention differs in the order of its sums.
    assert (ours - theirs).abs().max() < 0.05 * theirs.abs().max()

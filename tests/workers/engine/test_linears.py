"""Packed and 8-bit linear layers against plain ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.tiny import make_tiny_checkpoint
from workers.engine.engine import Engine, Slice
from workers.engine.linears import (
    Int8Linear,
    PackedLinear,
    quantise_channels,
    quantise_model,
    replace_linears,
)


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


def test_a_single_row_has_the_bits_it_has_in_company() -> None:
    torch.manual_seed(0)
    packed = PackedLinear(nn.Linear(1536, 576).requires_grad_(False))
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


def test_quantised_weights_are_within_half_a_step() -> None:
    weight_MN = make_linear(bias=False).weight
    weight_MN[3] = 0
    steps_MN, scale_M = quantise_channels(weight_MN)
    assert steps_MN.dtype == torch.int8
    restored_MN = steps_MN.float() * scale_M.float()[:, None]
    # Half a step, and what rounding the scale to bfloat16 (2^-9) clips from the largest weight.
    bound_M = scale_M.float() * (0.5 + 127 * 2**-8)
    assert ((restored_MN - weight_MN).abs() <= bound_M[:, None]).all()
    assert (restored_MN[3] == 0).all()


def test_no_plain_linear_is_left_and_a_tied_embedding_keeps_its_weight(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    embedding = model.get_input_embeddings().weight.clone()
    replace_linears(model, "float32")
    assert not [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert isinstance(model.lm_head, PackedLinear)
    assert torch.equal(model.get_input_embeddings().weight, embedding)


def test_the_peers_int8_model_has_the_engines_weights(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    engine = Engine(folder, weights="int8", threads=1, kv_memory_bytes=1 << 20)
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    quantise_model(peer)
    token_ids = torch.randint(384, (20,), generator=torch.Generator().manual_seed(2)).tolist()
    ours = engine.step([Slice([0], 0, token_ids, 20)])
    with torch.no_grad():
        theirs = peer(torch.tensor([token_ids])).logits[0].float()
    assert ours.dtype == torch.float32
    # bfloat16 has 8 bits; attention differs in the order of its sums.
    assert (ours - theirs).abs().max() < 0.05 * theirs.abs().max()

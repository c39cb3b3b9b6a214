"""Joined projections and native norms give the bits of what they replace."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.tiny import make_tiny_checkpoint
from workers.engine.cpu.engine import CpuEngine
from workers.engine.load import model as model_module
from workers.engine.modules import NativeNorm, ProjectionPart, join_projections, replace_norms
from workers.engine.slices import Slice


class Attention(nn.Module):
    def __init__(self, biases: tuple[bool, bool, bool]) -> None:
        super().__init__()
        self.q_proj = nn.Linear(32, 24, bias=biases[0])
        self.k_proj = nn.Linear(32, 8, bias=biases[1])
        self.v_proj = nn.Linear(32, 16, bias=biases[2])


class ShiftedNorm(nn.Module):
    """A norm with the attributes of RMSNorm that computes something else, as Gemma's does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32), requires_grad=False)
        self.variance_epsilon = 1e-6

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.rms_norm(rows, (32,), 1 + self.weight, self.variance_epsilon)


@pytest.mark.parametrize("bias", [True, False])
def test_joined_projections_are_the_single_ones(bias: bool) -> None:
    torch.manual_seed(0)
    attention = Attention((bias, bias, bias)).requires_grad_(False)
    rows_TN = torch.randn(1, 5, 32)
    names = ("q_proj", "k_proj", "v_proj")
    single = [getattr(attention, name)(rows_TN) for name in names]
    join_projections(attention)
    for name, expected in zip(names, single, strict=True):
        assert torch.allclose(getattr(attention, name)(rows_TN), expected, atol=1e-5)


def test_projections_of_unlike_kinds_are_left_alone() -> None:
    attention = Attention((True, False, False))
    join_projections(attention)
    assert isinstance(attention.q_proj, nn.Linear)


def test_a_norm_of_another_kind_is_left_alone() -> None:
    holder = nn.ModuleDict({"norm": ShiftedNorm()})
    replace_norms(holder)
    assert isinstance(holder["norm"], ShiftedNorm)


def test_the_engine_uses_both_and_its_bits_are_those_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    piece = Slice([0], 0, list(range(100)), 100)

    def make_engine() -> CpuEngine:
        return CpuEngine(folder, threads=1, kv_memory_bytes=1 << 20)

    fused = make_engine()
    kinds = {type(module) for module in model_module.load_on_cpu(folder, "float32").modules()}
    assert {ProjectionPart, NativeNorm} <= kinds
    monkeypatch.setattr(model_module, "join_projections", lambda model: None)
    monkeypatch.setattr(model_module, "replace_norms", lambda model: None)
    assert torch.equal(fused.step([piece]), make_engine().step([piece]))

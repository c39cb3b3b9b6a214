"""The lean forward gives the logits of the model's own code, and is not used where it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.processor import NEEDS_BFLOAT16
from tests.tiny import Architecture, make_tiny_checkpoint
from workers.engine.cpu import engine as engine_module
from workers.engine.cpu.attention import CpuStep
from workers.engine.cpu.engine import CpuEngine
from workers.engine.cpu.kv_cache import CpuKvCache
from workers.engine.cpu.step_plan import make_plan
from workers.engine.forward import (
    LeanForward,
    choose_forward,
    hugging_face_forward,
    probe_slice,
)
from workers.engine.load.model import load_on_cpu
from workers.engine.options import WeightForm
from workers.engine.slices import Slice

TOKEN_IDS = torch.randint(384, (200,), generator=torch.Generator().manual_seed(4)).tolist()


def make_engine(folder: Path, weights: WeightForm) -> CpuEngine:
    return CpuEngine(folder, weights=weights, threads=1, kv_memory_bytes=1 << 20)


@pytest.mark.parametrize(
    "weights", ["float32", pytest.param("bfloat16", marks=NEEDS_BFLOAT16), "int8", "int4"]
)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_both_ways_give_the_same_bits(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    architecture: Architecture,
    weights: WeightForm,
) -> None:
    folder = make_tiny_checkpoint(tmp_path, architecture=architecture)
    lean = make_engine(folder, weights)
    assert isinstance(lean._forward, LeanForward)
    monkeypatch.setattr(
        engine_module, "choose_forward", lambda model, step: hugging_face_forward(model)
    )
    own = make_engine(folder, weights)
    assert not isinstance(own._forward, LeanForward)
    for start, end in ((0, 190), (190, 191), (191, 200)):
        piece = Slice([1, 0], start, TOKEN_IDS[start:end], end - start)
        assert torch.equal(lean.step([piece]), own.step([piece]))


class Scaled(nn.Module):
    """A layer that looks plain to the lean forward, but whose own code does more."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        for name, child in inner.named_children():
            setattr(self, name, child)
        self.inner = inner

    def forward(self, hidden: torch.Tensor, **arguments: object) -> torch.Tensor:
        result: torch.Tensor = self.inner(hidden, **arguments)
        return result * 1.01


class Renamed(nn.Module):
    """A layer whose parts have other names."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor, **arguments: object) -> torch.Tensor:
        result: torch.Tensor = self.inner(hidden, **arguments)
        return result


@pytest.mark.parametrize("wrapper", [Scaled, Renamed])
def test_a_model_of_another_kind_runs_its_own_code(
    tmp_path: Path, wrapper: type[nn.Module]
) -> None:
    model = load_on_cpu(make_tiny_checkpoint(tmp_path), "float32")
    cache = CpuKvCache(num_layers=2, num_heads=2, head_size=8, num_blocks=1, dtype=torch.float32)
    plan = make_plan([probe_slice(384)], num_query_heads=6, num_kv_heads=2, min_tokens=2)
    step = CpuStep(plan, cache.layers)
    with torch.inference_mode():
        assert isinstance(choose_forward(model, step), LeanForward)
        layers = model.get_submodule("model.layers")
        assert isinstance(layers, nn.ModuleList)
        layers[0] = wrapper(layers[0])
        assert not isinstance(choose_forward(model, step), LeanForward)

"""The scales of a checkpoint for float8 KV: read by each rank, used as they are stored and read."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("triton")

from paceline.errors import CheckpointError
from tests.tiny import make_tiny_checkpoint
from tests.workers.engine.cuda.engines import make_engine
from tests.workers.engine.cuda.rounding import round_as_devices_do
from workers.engine.cuda.attention import Ragged, Trees, attend_by_reference, attend_trees
from workers.engine.cuda.attention_kernel import attend_pages
from workers.engine.cuda.engine import CudaEngine
from workers.engine.cuda.kv_cache import FLOAT8, CudaKvCache, LayerPages
from workers.engine.cuda.layer_kernels import rotate_and_store
from workers.engine.cuda.tree_kernel import attend_paths
from workers.engine.load.model import kv_scales_of
from workers.engine.open import check_ahead
from workers.engine.parallel.weight_cuts import Place
from workers.engine.slices import Slice

INTERPRETED = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="there is a GPU, so nothing is interpreted"
)
LAYERS, HEADS = 2, 2
"""Of the tiny checkpoint; it has two query heads for each of these."""
WEIGHTS = "model.safetensors"
Names = Callable[[int, str], str]


def with_scales(
    folder: Path,
    scales: dict[str, Tensor],
    *,
    scheme: object = "static",
) -> Path:
    """A tiny checkpoint in the folder, with these tensors beside its own."""
    if not folder.joinpath("config.json").exists():
        make_tiny_checkpoint(folder)
    save_file(load_file(folder / WEIGHTS) | scales, folder / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "kv_cache_scheme": scheme,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def numbered(name: Names, *, shape: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """Scales that are all different: 1, 2, ... for keys and values of layer 0, then of layer 1."""
    size = max(1, torch.Size(shape).numel())
    return {
        name(layer, side): (torch.arange(size) + 1.0 + size * (2 * layer + number)).reshape(shape)
        for layer in range(LAYERS)
        for number, side in enumerate("kv")
    }


@pytest.mark.parametrize(
    "name",
    [
        lambda layer, side: f"model.layers.{layer}.self_attn.{side}_scale",
        lambda layer, side: f"model.layers.{layer}.self_attn.attn.{side}_scale",
        lambda layer, side: f"model.layers.{layer}.self_attn.{side}_proj.{side}_scale",
        lambda layer, side: f"model.layers.{layer}.self_attn.{side}_proj.output_scale",
    ],
)
def test_a_number_for_all_heads_is_read_under_each_known_name(tmp_path: Path, name: Names) -> None:
    scales = kv_scales_of(with_scales(tmp_path, numbered(name)), Place())
    assert scales is not None
    assert scales.tolist() == [[[1, 1], [2, 2]], [[3, 3], [4, 4]]]


def test_one_number_for_keys_and_values(tmp_path: Path) -> None:
    stored = {
        f"model.layers.{n}.self_attn.kv_scale": torch.tensor([n + 2.0]) for n in range(LAYERS)
    }
    scales = kv_scales_of(with_scales(tmp_path, stored), Place())
    assert scales is not None
    assert scales.tolist() == [[[2, 2], [2, 2]], [[3, 3], [3, 3]]]


def of_heads(layer: int, side: str) -> str:
    return f"model.layers.{layer}.self_attn.{side}_scale"


def test_each_rank_reads_the_scales_of_its_heads(tmp_path: Path) -> None:
    """Also of a head that several ranks hold."""
    folder = with_scales(tmp_path, numbered(of_heads, shape=(HEADS, 1, 1)))
    whole = kv_scales_of(folder, Place())
    assert whole is not None
    assert whole.tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
    for degree, held in ((2, (0, 1)), (4, (0, 0, 1, 1))):
        for rank, head in enumerate(held):
            part = kv_scales_of(folder, Place(rank, degree))
            assert part is not None
            assert torch.equal(part, whole[:, :, head : head + 1])


def test_a_checkpoint_without_scales_has_none(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path)
    assert kv_scales_of(tmp_path, Place()) is None


@pytest.mark.parametrize(
    ("change", "scheme", "why"),
    [
        ({"k": None}, "static", "none for the keys of layer 1"),
        ({"k": torch.tensor(0.0)}, "static", "is 0.0, expected a positive number"),
        ({"v": torch.tensor(float("nan"))}, "static", "is nan, expected a positive number"),
        ({"v": torch.ones(3)}, "static", "one for each of 2 heads"),
        ({"v": torch.ones(1, dtype=torch.int32)}, "static", "expected one number"),
        ({}, {"type": "int", "num_bits": 8}, "kv_cache_scheme is int of 8 bits"),
        ({}, {"type": "float", "num_bits": 8, "symmetric": False}, "not symmetric"),
    ],
)
def test_scales_that_cannot_be_used_are_refused_before_a_worker_starts(
    tmp_path: Path, change: dict[str, Tensor | None], scheme: object, why: str
) -> None:
    scales: dict[str, Tensor | None] = {**numbered(of_heads)}
    scales |= {of_heads(1, side): tensor for side, tensor in change.items()}
    kept = {name: tensor for name, tensor in scales.items() if tensor is not None}
    folder = with_scales(tmp_path, kept, scheme=scheme)
    with pytest.raises(CheckpointError, match=why):
        check_ahead(
            folder, device="cuda", weights="float32", kv_memory_bytes=None, kv_dtype="fp8", degree=2
        )
    check_ahead(folder, device="cuda", weights="float32", kv_memory_bytes=None)  # not read


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_pages(scales_2H: Tensor) -> LayerPages:
    """Three pages of two heads of 16; values are far from 1."""
    cache = CudaKvCache(
        num_layers=1,
        num_heads=2,
        head_size=16,
        num_blocks=3,
        dtype=FLOAT8,
        device=torch.device("cpu"),
        scales_L2H=scales_2H[None],
    )
    layer = cache.layers[0]
    for seed, pages in enumerate((layer.keys_NPHD, layer.values_NPHD)):
        pages.copy_(draw(*pages.shape, seed=seed) * 8)
    return layer


def exact(query_AD: Tensor, layer: LayerPages, slots: list[int], scaling: float) -> Tensor:
    """The output of one token that sees these slots, in float64."""
    assert layer.scales_2H is not None
    keys, values = (
        pages[slots].to(torch.float64) * scales_H.to(torch.float64)[:, None]
        for pages, scales_H in zip((layer.keys_SHD, layer.values_SHD), layer.scales_2H, strict=True)
    )
    outputs = []
    for number, query_D in enumerate(query_AD.to(torch.float64)):
        weights = torch.softmax(keys[:, number // 2] @ query_D * scaling, dim=0)
        outputs.append(weights @ values[:, number // 2])
    return torch.stack(outputs)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@INTERPRETED
@pytest.mark.parametrize("scratch_bytes", [0, 1 << 28])
def test_attention_over_scaled_pages_is_that_of_float64(scratch_bytes: int) -> None:
    """Chains, whose units are folded at once or stored first, and nodes of a tree."""
    scales_2H = torch.tensor([[0.05, 0.125], [0.3, 7.0]])
    layer, queries = random_pages(scales_2H), draw(5, 4, 16, seed=3)
    ends, used, table = ints(0, 2, 5), ints(270, 600), torch.tensor([[2, 0, 0], [1, 2, 0]]).int()
    found, _ = attend_pages(
        queries, layer, ends, used, table, 0.3, causal=True, scratch_bytes=scratch_bytes
    )
    ragged = Ragged(ends, used, table, 3, ((2, 270), (3, 600)))
    plain, _ = attend_by_reference(queries, layer, ragged, 0.3, causal=True)
    seen = [(0, 269), (0, 270), (1, 598), (1, 599), (1, 600)]
    for token, (sequence, count) in enumerate(seen):
        slots = [int(table[sequence, n // 256]) * 256 + n % 256 for n in range(count)]
        expected = exact(queries[token], layer, slots, 0.3)
        for output in (found, plain):
            assert float((output[token] - expected).abs().max()) < 2e-5 * float(
                expected.abs().max()
            )
    paths = torch.tensor([[3, 8, 400, 401]] * 5).int()
    shared, counts = ints(64, 128), ints(1, 2, 3, 4, 2)
    nodes = attend_paths(
        queries, layer, ends, shared, table, paths, counts, 0.3, scratch_bytes=scratch_bytes
    )
    trees = Trees(Ragged(ends, shared, table, 3, ((2, 64), (3, 128))), paths, counts)
    merged = attend_trees(queries, layer, trees, 0.3)
    for token, (sequence, _) in enumerate(seen):
        slots = [int(table[sequence, 0]) * 256 + n for n in range(int(shared[sequence]))]
        slots += paths[token, : int(counts[token])].tolist()
        expected = exact(queries[token], layer, slots, 0.3)
        for output in (nodes, merged):
            assert float((output[token] - expected).abs().max()) < 2e-5 * float(
                expected.abs().max()
            )


@INTERPRETED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_are_scaled_and_stored_with_torchs_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    round_as_devices_do(monkeypatch)
    heads = (draw(7, 8, 16) * torch.logspace(-4, 4, 7)[:, None, None]).to(dtype)
    cos, sin = torch.ones(7, 16, dtype=dtype), torch.zeros(7, 16, dtype=dtype)
    slots = torch.tensor([9, 300, 4, 0, 17, 255, 256])
    scales_2H = torch.tensor([[0.05, 3.0], [0.3, 7.0]])
    made, expected = random_pages(scales_2H), random_pages(scales_2H)
    rotate_and_store(*(heads, cos, sin, slots, made.keys_SHD, made.values_SHD), scales_2H=scales_2H)
    expected.store(slots, heads[:, 4:6], heads[:, 6:])
    for name in ("keys_SHD", "values_SHD"):
        bits = [getattr(one, name).view(torch.uint8) for one in (made, expected)]
        assert torch.equal(*bits)
    largest = expected.keys_SHD[255, 0].to(torch.float32).abs().max() * 0.05
    assert float(largest) < 23, "what is too large for its scale is cut to 448 steps"


@pytest.fixture
def exact_and_scaled(tmp_path: Path) -> tuple[Path, Tensor]:
    """A tiny checkpoint whose values are below float8's smallest number, and scales for them."""
    folder = make_tiny_checkpoint(tmp_path)
    weights = load_file(folder / WEIGHTS)
    for name, weight in weights.items():
        if "v_proj" in name or "o_proj" in name:
            weight *= 1e-4 if "v_proj" in name else 1e4
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    plain = make_engine(folder, "cpu")
    plain.step([Slice([0], 0, list(range(3, 90)), 1)])
    scales = {}
    for number, layer in enumerate(plain._cache.layers):
        for side, pages in (("k", layer.keys_SHD), ("v", layer.values_SHD)):
            largest_H = pages[:87].abs().amax(dim=(0, 2))
            scales[of_heads(number, side)] = (largest_H / 448).reshape(-1, 1, 1)
    read = kv_scales_of(with_scales(folder, scales), Place())
    assert read is not None
    return folder, read


def test_an_engine_with_scales_is_nearer_to_the_model_and_says_that_it_has_them(
    exact_and_scaled: tuple[Path, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    folder, scales = exact_and_scaled
    fed = [Slice([0], 0, list(range(3, 90)), 87)]
    expected = make_engine(folder, "cpu").step(fed)
    said = []
    apart = []
    for given in (None, scales):
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            engine: CudaEngine = make_engine(folder, "cpu", kv_dtype="fp8", kv_scales_L2H=given)
            said += [line for line in caplog.messages if "float8 KV" in line]
        apart.append(float((engine.step(fed) - expected).norm() / expected.norm()))
    assert apart[1] < 0.15 < 0.5 < apart[0], apart
    assert ["scale 1" in line for line in said] == [True, False]
    assert "the checkpoint's scales" in said[1]

"""Steps on the meta device: correct kernel calls, and no data from the host.

It shows without a GPU the shapes, types and strides of every operation, that no step asks the
device for a value, and that a captured step copies nothing from the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers import PreTrainedConfig as Config

from tests.workers.engine.cuda.kernel_contract import DeviceAlone, check_call
from tests.workers.engine.trees import random_tree
from workers.engine.cuda import attention, layer_kernels
from workers.engine.cuda.graphs import shapes_to_capture
from workers.engine.cuda.kv_cache import CudaKvCache
from workers.engine.cuda.layer_kernels import KernelOperations
from workers.engine.cuda.linears import FIXED_ROWS, adapt_model
from workers.engine.cuda.step import (
    DeviceStep,
    Heads,
    Layout,
    Shape,
    exact_shape,
    lay_out,
    read_inputs,
)
from workers.engine.forward import (
    ATTENTION,
    LeanForward,
    Step,
    hugging_face_forward,
    register_attention,
)
from workers.engine.modules import NativeNorm
from workers.engine.slices import Slice

META = torch.device("meta")
VOCAB, LAYERS, HEADS, KV_HEADS, HEAD_SIZE = 300, 2, 4, 2, 64
PAGES, BLOCKS = 5, 9
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_SIZE,
    "max_position_embeddings": 1024,
}
Forwards = tuple[Callable[[Step], Tensor], ...]
BETWEEN_PRODUCTS = ("_add_and_norm", "_rotate_and_store", "_gate")


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use torch's own meta implementation of the kernel."""
    monkeypatch.setattr(attention, "can_use_kernel", lambda *_: True)


class Kernel:
    """Replaces one of our kernels, which have no meta implementation, and notes its launches."""

    def __init__(self, name: str, launched: list[str]) -> None:
        self._name = name
        self._launched = launched

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *_, **__: self._launched.append(self._name)


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of our launched kernels between products."""
    names: list[str] = []
    for name in BETWEEN_PRODUCTS:
        monkeypatch.setattr(layer_kernels, name, Kernel(name, names))
    return names


def make_forwards(config: Config, *, batch_invariant: bool) -> Forwards:
    """All ways to run a model without memory: its own code, torch's operations, our kernels."""
    register_attention()
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=ATTENTION, dtype=torch.bfloat16
    )
    assert isinstance(model, PreTrainedModel)
    model.requires_grad_(False)
    adapt_model(model, batch_invariant=batch_invariant)
    nn.Module.to(model, META)
    for module in model.modules():
        if isinstance(module, NativeNorm):
            module._weight = module._weight.to(META)
    return (
        hugging_face_forward(model),
        LeanForward(model),
        LeanForward(model, KernelOperations()),
    )


def make_step(layout: Layout) -> DeviceStep:
    cache = CudaKvCache(
        num_layers=LAYERS,
        num_heads=KV_HEADS,
        head_size=HEAD_SIZE,
        num_blocks=BLOCKS,
        dtype=torch.bfloat16,
        device=META,
    )
    array = torch.empty(layout.array.shape, dtype=torch.int32, device=META)
    rows = torch.arange(layout.shape.num_rows, device=META)
    return DeviceStep(
        read_inputs(array, layout, table_pages=PAGES), rows, cache, Heads(HEADS, KV_HEADS)
    )


def steps() -> dict[str, Sequence[Slice]]:
    tree = random_tree(1, prefix_length=250, num_nodes=8, vocab_size=VOCAB)
    chains = [Slice([0, 3], 255, [1] * 9, 9), Slice([1], 0, [4], 1), Slice([2], 7, [4, 5], 0)]
    return {
        "prefill": [Slice([0, 3, 5], 0, [1] * 700, 1), Slice([1], 0, [4] * 200, 200)],
        "chains": chains,
        "trees": [tree.piece([4, 5], 249, 8, 9), tree.piece([6, 7], 250, 3, 3)],
        "trees beside chains": [tree.piece([4, 5], 249, 8, 9), *chains],
        "a tree without a stem": [Slice([2], 0, [1, 2, 3], 3, 1, (0, 0))],
    }


def captured_shape(slices: Sequence[Slice], fixed_rows: int) -> Shape:
    """The smallest shape of a graph that holds a step."""
    shapes = shapes_to_capture(max_num_seqs=64, max_step_tokens=2048, fixed_rows=fixed_rows)
    holding = [shape for shape in shapes if shape.holds(exact_shape(slices))]
    return min(holding, key=lambda shape: shape.num_tokens)


@pytest.mark.parametrize("batch_invariant", [True, False])
@pytest.mark.parametrize(
    "config", [LlamaConfig(**SIZES), Qwen2Config(**SIZES), Qwen3Config(**SIZES)]
)
def test_steps_need_nothing_from_the_host(config: Config, batch_invariant: bool) -> None:
    """Both directly and as a graph captures them."""
    forwards = make_forwards(config, batch_invariant=batch_invariant)
    fixed_rows = FIXED_ROWS if batch_invariant else 1
    for slices in steps().values():
        shapes = [exact_shape(slices), captured_shape(slices, fixed_rows)]
        for shape in shapes:
            layout = lay_out(slices, shape, table_pages=PAGES, scratch_block=BLOCKS)
            for forward in forwards:
                with torch.inference_mode(), DeviceAlone() as watched:
                    logits_TV = forward(make_step(layout))
                assert logits_TV.shape == (shape.num_rows, VOCAB)
                parts = (shape.num_chains > 0) + (shape.num_trees > 0)
                assert len(watched.calls) == parts * LAYERS


@pytest.mark.parametrize("config", [LlamaConfig(**SIZES), Qwen3Config(**SIZES)])
def test_four_kernels_a_layer_between_products(config: Config, launched: list[str]) -> None:
    """Beside them, no operation of torch computes or copies."""
    forward = make_forwards(config, batch_invariant=True)[2]
    slices = steps()["chains"]
    shape = captured_shape(slices, FIXED_ROWS)
    layout = lay_out(slices, shape, table_pages=PAGES, scratch_block=BLOCKS)
    step = make_step(layout)
    launched.clear()
    with torch.inference_mode(), DeviceAlone() as watched:
        forward(step)
    norm, rotate, gate = BETWEEN_PRODUCTS
    assert launched == [norm, rotate, norm, gate] * LAYERS + [norm]
    first, last = (watched.names.index(name) for name in ("linear", "index_select"))
    views = {"slice", "reshape", "view", "split_with_sizes", "new_empty", "empty_like"}
    assert set(watched.names[first:last]) == views | {"linear", "_varlen_attn"}


def test_every_captured_shape_keeps_to_the_kernel() -> None:
    _, forward, _ = make_forwards(
        LlamaConfig(**SIZES | {"num_hidden_layers": 1}), batch_invariant=True
    )
    shapes = shapes_to_capture(max_num_seqs=64, max_step_tokens=2048, fixed_rows=FIXED_ROWS)
    for shape in shapes:
        layout = lay_out([], shape, table_pages=PAGES, scratch_block=BLOCKS)
        with torch.inference_mode(), DeviceAlone() as watched:
            forward(make_step(layout))
        # Of the products, only the LM head is padded, if it has fewer rows.
        assert watched.names.count("pad") == (1 if shape.num_rows % FIXED_ROWS else 0)
        windows = [[-1, 0]] * (shape.num_chains > 0) + [[-1, -1]] * (shape.num_trees > 0)
        assert [call["window_size"] for call in watched.calls] == windows
        for call in watched.calls:
            assert call["is_causal"] is (call["window_size"] == [-1, 0])
            assert call["enable_gqa"] is True


def test_data_of_the_host_is_noticed() -> None:
    """Negative controls of the watch and of the contract."""
    with pytest.raises(AssertionError, match="takes data from the host"), DeviceAlone():
        torch.zeros(3).to(META)
    forwards = make_forwards(LlamaConfig(**SIZES), batch_invariant=False)
    layout = lay_out(
        steps()["chains"],
        exact_shape(steps()["chains"]),
        table_pages=PAGES,
        scratch_block=BLOCKS,
    )
    with torch.inference_mode(), DeviceAlone() as watched:
        forwards[1](make_step(layout))
    for name, wrong in (("cu_seq_k", None), ("num_splits", None), ("max_q", 1)):
        with pytest.raises(AssertionError):
            check_call(watched.calls[0] | {name: wrong})

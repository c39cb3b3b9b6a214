"""The kernels that one rank of four of an 80-layer model launches in a step, counted without a GPU,
and without the sums over the ranks.

Tensors are on torch's meta device. A recorder counts torch's operations, except views and
allocations, and each launch of our own kernels, which then does nothing. Widths are small: they
do not change what is launched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from workers.engine.cuda import attention, linears
from workers.engine.cuda.graphs import shapes_to_capture
from workers.engine.cuda.kv_cache import FLOAT8, CudaKvCache
from workers.engine.cuda.layer_kernels import KernelOperations
from workers.engine.cuda.linears import FIXED_ROWS, Fp8Linear, adapt_model
from workers.engine.cuda.step import DeviceStep, Heads, exact_shape, lay_out, read_inputs
from workers.engine.forward import ATTENTION, LayerOperations, LeanForward, register_attention
from workers.engine.load.stored_tensors import Fp8Weight
from workers.engine.modules import NativeNorm
from workers.engine.parallel.group import RankGroup
from workers.engine.parallel.sharding import Sharding, join_ranks
from workers.engine.parallel.weight_cuts import Place
from workers.engine.slices import Slice

META = torch.device("meta")
LAYERS, HEAD_SIZE, PAGES, BLOCKS = 80, 64, 5, 9
WHOLE = LlamaConfig(
    vocab_size=400,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=LAYERS,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=HEAD_SIZE,
    max_position_embeddings=1024,
)
PRODUCTS = {"linear", "mm", "addmm", "_scaled_mm"}
_ALLOCATIONS = {"empty", "empty_like", "new_empty", "empty_strided"}


class Recorder(TorchDispatchMode):
    """Counts what a step launches, by name. Use it with `monkeypatch`, which undoes the rest."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        TorchDispatchMode.__init__(self)
        self.launched: Counter[str] = Counter()

        def note(kernel: Any, grid: object) -> Callable[..., None]:
            return lambda *_, **__: self.launched.update([kernel.fn.__name__])

        for kind in (InterpretedFunction, JITFunction):
            monkeypatch.setattr(kind, "__getitem__", note)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func.overloadpacket.__name__
        views = any(one.alias_info and not one.alias_info.is_write for one in func._schema.returns)
        if not views and name not in _ALLOCATIONS:
            self.launched[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets attention be launched on a device that has none."""
    monkeypatch.setattr(attention, "can_use_kernel", lambda *_: True)
    monkeypatch.setattr(attention, "can_run_kernels", lambda *_: True)


def launches(
    monkeypatch: pytest.MonkeyPatch,
    operations: LayerOperations,
    slices: Sequence[Slice],
    float8: Float8 | None = None,
) -> Counter[str]:
    """What a captured step of rank 0 of 4 launches. `float8`: the form of all layers' weights."""
    register_attention()
    place = Place(0, 4)
    group = RankGroup(place, host="127.0.0.1")
    sharding = Sharding(WHOLE, "model", place)
    config = sharding.local_config()
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=ATTENTION, dtype=torch.bfloat16
    )
    model.requires_grad_(False)
    if float8 is not None:
        for parent in list(model.model.layers.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, Fp8Linear(float8(child), None, torch.bfloat16))
    join_ranks(model, sharding, group)
    adapt_model(model, batch_invariant=True)
    nn.Module.to(model, META)
    for module in model.modules():
        if isinstance(module, NativeNorm):
            module._weight = module._weight.to(META)
    forward = LeanForward(model, operations)
    heads = Heads(config.num_attention_heads, config.num_key_value_heads)
    assert heads == Heads(16, 2)
    cache = CudaKvCache(
        num_layers=LAYERS,
        num_heads=heads.num_keys,
        head_size=HEAD_SIZE,
        num_blocks=BLOCKS,
        dtype=torch.bfloat16,
        device=META,
    )
    shapes = shapes_to_capture(max_num_seqs=4, max_step_tokens=64, fixed_rows=FIXED_ROWS)
    shape = next(one for one in shapes if one.holds(exact_shape(slices)))
    layout = lay_out(slices, shape, table_pages=PAGES, scratch_block=BLOCKS)
    array = torch.empty(layout.array.shape, dtype=torch.int32, device=META)
    inputs = read_inputs(array, layout, table_pages=PAGES)
    step = DeviceStep(inputs, inputs.logit_rows[: shape.num_rows], cache, heads)
    recorder = Recorder(monkeypatch)
    with torch.inference_mode(), group.alone(), recorder:
        forward(step)  # A graph is captured after steps that warm up.
        recorder.launched.clear()
        logits_TV: Tensor = forward(step)
    assert logits_TV.shape[0] == shape.num_rows
    group.close()
    return recorder.launched


Float8 = Callable[[nn.Linear], Fp8Weight]


def float8_of(linear: nn.Linear, *, block: int | None = None, is_static: bool = False) -> Fp8Weight:
    outputs, inputs = linear.weight.shape
    scales = (
        torch.ones(outputs, 1) if block is None else torch.ones(outputs // block, inputs // block)
    )
    input_scale = torch.tensor(0.02) if is_static else None
    return Fp8Weight(torch.zeros(outputs, inputs, dtype=FLOAT8), scales, input_scale)


SLICES = [Slice([i], 100, [1] * 9, 9) for i in range(4)]


def test_at_most_six_kernels_a_layer_without_products_and_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = launches(monkeypatch, KernelOperations(), SLICES)
    products = sum(found[name] for name in PRODUCTS)
    assert products == 4 * LAYERS + 1  # and the LM head
    a_layer = {name: count // LAYERS for name, count in found.items() if count >= LAYERS}
    beside = {name: count for name, count in a_layer.items() if name not in PRODUCTS}
    # Both norms have the residual addition in them.
    assert beside["_add_and_norm"] == 2
    assert beside["_rotate_and_store"] == beside["_gate"] == 1
    assert sum(beside.values()) <= 6, found
    # Once a step: the embedding, rotary factors, the last norm, the rows.
    once = sum(found.values()) - sum(a_layer.values()) * LAYERS
    assert once <= 20, found


@pytest.mark.parametrize(
    ("form", "rounded_alone"), [({"is_static": True}, 0), ({}, 1), ({"block": 128}, 1)]
)
def test_float8_products_add_at_most_one_kernel_a_layer(
    form: dict[str, Any], rounded_alone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms and the gate round the rows of the next product."""
    monkeypatch.setattr(linears, "can_run_kernels", lambda _: True)
    found = launches(
        monkeypatch, KernelOperations(), SLICES, lambda linear: float8_of(linear, **form)
    )
    assert sum(found[name] for name in PRODUCTS) == 4 * LAYERS + 1
    a_layer = {name: count // LAYERS for name, count in found.items() if count >= LAYERS}
    beside = {name: count for name, count in a_layer.items() if name not in PRODUCTS}
    # Attention rounds by a given scale only: the largest number of a row is in several programs.
    assert beside.pop("_round_rows", 0) == rounded_alone
    assert beside["_add_and_norm"] == 2
    assert sum(beside.values()) <= 6, found


def test_without_our_kernels_the_recorder_counts_many_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: torch's operations between the products are seen."""
    found = launches(monkeypatch, LayerOperations(), SLICES)
    beside = sum(found.values()) - sum(found[name] for name in PRODUCTS)
    assert beside > 12 * LAYERS


@pytest.mark.parametrize("is_static", [False, True])
def test_one_kernel_rounds_the_rows_of_a_float8_product(
    is_static: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place of several of torch's, the negative control. (Conversions are not counted.)"""
    found = []
    for can in (True, False):
        monkeypatch.setattr(linears, "can_run_kernels", lambda _, can=can: can)
        weight = Fp8Weight(
            torch.empty(256, 128, dtype=torch.float8_e4m3fn, device=META),
            torch.empty(256, 1, device=META),
            torch.empty((), device=META) if is_static else None,
        )
        model = nn.Sequential(Fp8Linear(weight, None, torch.bfloat16))
        adapt_model(model, batch_invariant=True)
        recorder = Recorder(monkeypatch)
        with torch.inference_mode(), recorder:
            model(torch.empty(FIXED_ROWS, 128, dtype=torch.bfloat16, device=META))
        found.append(recorder.launched)
    ours, torchs = found
    assert ours == {"_round_rows": 1, "_scaled_mm": 1}
    assert sum(torchs.values()) - torchs["_scaled_mm"] >= (2 if is_static else 6), torchs

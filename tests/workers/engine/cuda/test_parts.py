"""Memory, shapes and linears of the CUDA package: arithmetic that needs no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from paceline.errors import ConfigError
from tests.workers.engine.cuda.engines import DEVICES
from workers.engine.cuda.graphs import shapes_to_capture
from workers.engine.cuda.kv_cache import KEY_BLOCK, PAGE_SIZE, slot_of
from workers.engine.cuda.linears import (
    FIXED_ROWS,
    FixedRowsLinear,
    Fp8Linear,
    Rounding,
    adapt_model,
    can_multiply,
    to_fp8,
    trusted_sizes,
)
from workers.engine.cuda.step import exact_shape, lay_out, split
from workers.engine.load.stored_tensors import FP8_BLOCK, Fp8Weight
from workers.engine.memory import MemoryProfile, num_blocks_on_gpu
from workers.engine.modules import NativeNorm, ProjectionPart
from workers.engine.slices import Slice

GIB = 1 << 30
PROFILE = MemoryProfile(total=80 * GIB, free=60 * GIB, activations=GIB)
"""20 GiB of weights, and a tenth of the device is reserved: 50 GiB are left."""


def test_automatic_kv_takes_what_a_step_leaves() -> None:
    assert PROFILE.kv == 50 * GIB
    per_block = 32 << 20
    assert num_blocks_on_gpu(None, PROFILE, per_block=per_block, max_model_len=8192) == 1600


def test_too_little_memory_is_refused_with_the_numbers() -> None:
    tight = MemoryProfile(total=80 * GIB, free=9 * GIB, activations=GIB)
    with pytest.raises(ConfigError, match=rf"{71 * GIB} are taken.*leaves 0 for KV.*{GIB}: lower"):
        num_blocks_on_gpu(None, tight, per_block=32 << 20, max_model_len=8192)
    with pytest.raises(ConfigError, match=f"at least {GIB} bytes"):
        num_blocks_on_gpu(GIB - 1, PROFILE, per_block=32 << 20, max_model_len=8192)
    with pytest.raises(ConfigError, match=f"does not fit.*{60 * GIB} are free"):
        num_blocks_on_gpu(59 * GIB, PROFILE, per_block=32 << 20, max_model_len=8192)
    assert num_blocks_on_gpu(58 * GIB, PROFILE, per_block=GIB, max_model_len=256) == 58


def piece(width: int, parents: tuple[int, ...] = (), *, num_logits: int = 1) -> Slice:
    return Slice(range(9), 100, [1] * width, num_logits, 101 if parents else None, parents)


TREE = piece(4, (0, 0, 1), num_logits=4)
STEPS: dict[str, tuple[list[Slice], int]] = {
    "one token": ([piece(1)], 64),
    "one window": ([piece(9, num_logits=9)], 64),
    "64 tokens": ([piece(1)] * 64, 64),
    "64 windows of 8": ([piece(9, num_logits=9)] * 64, 640),
    "33 windows of 16": ([piece(17, num_logits=17)] * 33, 640),
    "windows beside a prefill": ([piece(9, num_logits=9)] * 30 + [piece(700)], 1024),
    "the largest prefill": ([piece(2048)], 2048),
    "a tree": ([TREE], 64),
    "64 trees": ([TREE] * 63, 320),
    "trees of 64 nodes beside windows": (
        [piece(65, (0,) * 64, num_logits=65)] * 4 + [piece(9, num_logits=9)] * 6,
        384,
    ),
    "trees beside windows and a prefill": (
        [TREE] * 20 + [piece(9, num_logits=9), piece(900)],
        1152,
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_of_every_kind_have_a_graph(name: str) -> None:
    """With the number of tokens to which they are padded."""
    slices, wanted = STEPS[name]
    shapes = shapes_to_capture(max_num_seqs=64, max_step_tokens=2048, fixed_rows=FIXED_ROWS)
    holding = [shape for shape in shapes if shape.holds(exact_shape(slices))]
    assert min(shape.num_tokens for shape in holding) == wanted
    layout = lay_out(slices, holding[0], table_pages=10, scratch_block=9)
    assert len(layout.logit_rows) == sum(one.num_logits for one in slices)


def test_other_steps_run_as_they_are() -> None:
    """More tokens, slices, logits, or a longer path than any shape has."""
    shapes = shapes_to_capture(max_num_seqs=64, max_step_tokens=2048, fixed_rows=FIXED_ROWS)
    for slices in (
        [piece(2049)],
        [piece(1)] * 66,
        [piece(700, num_logits=700)],
        [piece(130, (*tuple(range(128)), 0), num_logits=1)],
    ):
        assert not any(shape.holds(exact_shape(slices)) for shape in shapes)


@pytest.mark.parametrize("fixed_rows", [1, FIXED_ROWS])
def test_padding_has_slices_of_its_own(fixed_rows: int) -> None:
    """Products need no padding. Only padding reads the scratch page."""
    slices = [Slice([3, 4], 250, [7] * 9, 9), Slice([5], 0, [8], 1), TREE]
    shapes = shapes_to_capture(max_num_seqs=4, max_step_tokens=512, fixed_rows=fixed_rows)
    for shape in (shape for shape in shapes if shape.holds(exact_shape(slices))):
        assert shape.num_tokens % fixed_rows == 0
        layout = lay_out(slices, shape, table_pages=3, scratch_block=9)
        parts = split(layout.array, shape, 3)
        tree = shape.chain_tokens
        assert layout.logit_rows == (*range(10), *range(tree, tree + 4))
        assert parts["logit_rows"].tolist()[:14] == list(layout.logit_rows)
        assert parts["chain_ends"].tolist()[:3] == [0, 9, 10]
        assert set(parts["chain_ends"].tolist()[3:]) == {tree}
        assert parts["tree_ends"].tolist()[:2] == [0, 4]
        assert set(parts["tree_ends"].tolist()[2:]) == {shape.tree_tokens}
        padded = parts["slots"].tolist()
        assert set(padded[10:tree] + padded[tree + 4 :]) == {9 * PAGE_SIZE}
        assert set(parts["chain_table"][2:].flatten().tolist()) == {9}
        assert parts["chain_used"].tolist()[:3] == [259, 1, tree - 10]
        assert set(parts["path_counts"].tolist()[4:]) == {1}
        assert set(parts["path_slots"][4:].flatten().tolist()) == {9 * PAGE_SIZE}


def test_shapes_are_captured_in_the_order_of_their_use() -> None:
    """After the largest, whose memory all others reuse, the smallest come first."""
    shapes = shapes_to_capture(max_num_seqs=64, max_step_tokens=2048, fixed_rows=FIXED_ROWS)
    assert len(shapes) == len(set(shapes)) <= 50
    assert max(shape.num_rows for shape in shapes) == shapes[0].num_rows
    sizes = [shape.num_tokens for shape in shapes]
    assert sizes[0] == max(sizes) == 2048
    assert sizes[1:] == sorted(sizes[1:])


@pytest.mark.parametrize("end", [260, 250 + 64, 250 + 65, 2 * PAGE_SIZE, 2 * PAGE_SIZE + 1])
def test_tokens_lie_in_the_pages_of_their_sequence(end: int) -> None:
    """Few and many tokens, across pages that are not neighbors."""
    piece = Slice([7, 3, 5], 250, range(end - 250), 0)
    layout = lay_out([piece], exact_shape([piece]), table_pages=4, scratch_block=9)
    found = split(layout.array, layout.shape, 4)["slots"].tolist()
    assert found == [slot_of(piece.block_table, slot) for slot in range(250, end)]


@pytest.mark.parametrize("start", [100, 101, 103])
def test_a_node_sees_its_path_and_what_is_before_the_tree(start: int) -> None:
    """Slots from 101 on hold the tree. A slice feeds all of it or a part."""
    parents = (0, 0, 1, 2, 3, 3, 0, 4, 8, 9)
    end = 101 + len(parents)
    piece = Slice([4], start, [1] * (end - start), 1, 101, parents)
    layout = lay_out([piece], exact_shape([piece]), table_pages=1, scratch_block=9)
    parts = split(layout.array, layout.shape, 1)
    shared = min(start, 101) // KEY_BLOCK * KEY_BLOCK
    assert parts["tree_used"].tolist() == [shared]
    for row, slot in enumerate(range(start, end)):
        wanted = list(range(shared, min(slot + 1, 101)))
        node, path = slot - 100, []
        while node > 0:
            path.append(100 + node)
            node = parents[node - 1]
        wanted += path[::-1]
        assert parts["path_counts"][row] == len(wanted)
        found = parts["path_slots"][row, : len(wanted)] - 4 * PAGE_SIZE
        assert found.tolist() == wanted
    assert layout.shape.path_slots == max(parts["path_counts"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_product_do_not_depend_on_the_others(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    source = nn.Linear(96, 130).to(dtype)
    fixed = FixedRowsLinear(source)
    rows = torch.randn(2 * FIXED_ROWS + 5, 96).to(dtype)
    with torch.no_grad():
        whole = fixed(rows)
        assert torch.allclose(whole, source(rows), atol=0.02)
        for first, count in ((0, 1), (3, 9), (60, 70), (FIXED_ROWS, FIXED_ROWS)):
            # A row keeps its place in its tile. Whether another place gives the same bits is for
            # the device's kernels to say; the self-test checks it.
            place = first % FIXED_ROWS
            padded = torch.cat([rows.new_zeros(place, 96), rows[first : first + count]])
            assert torch.equal(fixed(padded)[place:], whole[first : first + count])
        assert fixed(rows[None, :3]).shape == (1, 3, 130)


@pytest.mark.parametrize("device", DEVICES)
def test_larger_products_give_the_same_bits(device: str) -> None:
    """For all numbers of rows that this device's trial accepts, on other rows."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(2)
    source = nn.Linear(512, 768, bias=False, device=device, dtype=dtype)
    sizes = trusted_sizes(source)
    assert sizes[0] == FIXED_ROWS
    rows = torch.randn(1000, 512, device=device, dtype=dtype)
    with torch.no_grad():
        expected = FixedRowsLinear(source)(rows)
        for count in (1, 65, 200, 1000):
            whole = FixedRowsLinear(source, sizes)(rows[:count])
            assert torch.equal(whole, expected[:count])


def reference_product(steps: Tensor, scales: Tensor, size: int) -> Tensor:
    """Steps [R, N] times scales, in float64. A scale is for `size` rows and 128 inputs."""
    spread = scales.double().repeat_interleave(size, 0)[: steps.shape[0]]
    spread = spread.repeat_interleave(FP8_BLOCK, 1)[:, : steps.shape[1]]
    return steps.double() * (spread if scales.shape[1] > 1 else scales.double())


def product_of_blocks(
    a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """In place of torch._scaled_mm, which has scales of blocks on GPUs only.

    It demands the shapes and strides that torch's ScaledBlas.cpp demands.
    """
    rows, inputs = a.shape
    blocks = -(-inputs // FP8_BLOCK)
    assert scale_a.shape == (rows, blocks)
    assert scale_a.stride() == (1, rows)
    assert scale_b.t().shape == (-(-b.shape[1] // FP8_BLOCK), blocks)
    assert scale_b.t().stride() == (-(-blocks // 4) * 4, 1)
    left = reference_product(a, scale_a, 1)
    right = reference_product(b.t(), scale_b.t(), FP8_BLOCK)
    return (left @ right.t()).to(out_dtype)


def fp8_weight(outputs: int, inputs: int, *, blocks: bool) -> Fp8Weight:
    shape = (outputs // FP8_BLOCK, inputs // FP8_BLOCK) if blocks else (outputs, 1)
    scales = torch.rand(shape) * 0.01 + 0.001
    return Fp8Weight((torch.randn(outputs, inputs) * 50).to(torch.float8_e4m3fn), scales)


@pytest.mark.parametrize("blocks", [False, True])
def test_float8_products(blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are rounded to float8, each by itself; the product is that of the rounded numbers."""
    if blocks:
        monkeypatch.setattr(torch, "_scaled_mm", product_of_blocks)
    torch.manual_seed(3)
    weight, bias = fp8_weight(256, 640, blocks=blocks), torch.randn(256)
    fixed = FixedRowsLinear(Fp8Linear(weight, bias, torch.float32))
    rows = torch.randn(70, 640) * torch.logspace(-3, 3, 70)[:, None]
    rows[4] = 0
    found = fixed(rows)
    plain = reference_product(weight.steps_MN, weight.scales, FP8_BLOCK)
    steps, row_scales = to_fp8(rows, Rounding(FP8_BLOCK if blocks else None))
    rounded = reference_product(steps, row_scales, 1)
    # Three bits after the leading one, and steps of 2 ** -9 scales for the smallest numbers.
    smallest = rows.abs().amax(dim=1, keepdim=True) / 448 * 2**-9
    assert bool(((rounded - rows).abs() <= rows.abs() / 16 + smallest).all())
    expected = rounded @ plain.t() + bias
    error = (found - expected).abs().amax(dim=1) / expected.abs().amax(dim=1)
    assert float(error.max()) < 1e-5  # sums in float32, of numbers that partly cancel
    assert torch.equal(found[4], bias)
    for first, count in ((0, 1), (3, 9), (0, FIXED_ROWS)):
        padded = torch.cat([rows.new_zeros(first, 640), rows[first : first + count]])
        assert torch.equal(fixed(padded)[first:], found[first : first + count])


def test_float8_layers_are_joined_with_the_same_bits() -> None:
    torch.manual_seed(4)
    q, k = (
        Fp8Linear(fp8_weight(count, 128, blocks=False), None, torch.float32) for count in (64, 32)
    )
    joined = q.joined([k])
    assert joined is not None
    rows = torch.randn(FIXED_ROWS, 128)
    assert torch.equal(joined(rows), torch.cat([q(rows), k(rows)], dim=1))
    assert q.joined([nn.Linear(128, 32)]) is None
    assert q.joined([Fp8Linear(fp8_weight(128, 256, blocks=True), None, torch.float32)]) is None


def test_one_scale_may_be_given_for_all_activations() -> None:
    """Numbers beyond it become the largest. Only layers with the same scale are joined."""
    torch.manual_seed(6)
    made, rows = fp8_weight(64, 128, blocks=False), torch.randn(FIXED_ROWS, 128)
    weight = Fp8Weight(made.steps_MN, made.scales, torch.tensor(0.004))
    layer = Fp8Linear(weight, None, torch.float32)
    steps = (rows / 0.004).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert rows.abs().max() > 448 * 0.004
    expected = steps.double() * 0.004 @ (made.steps_MN.double() * made.scales.double()).t()
    assert torch.allclose(layer(rows).double(), expected, atol=1e-5 * float(expected.abs().max()))
    joined = layer.joined([Fp8Linear(weight, None, torch.float32)])
    assert joined is not None
    assert torch.equal(joined(rows), torch.cat([layer(rows)] * 2, dim=1))
    other = Fp8Weight(made.steps_MN, made.scales, torch.tensor(0.005))
    for one in (made, other):
        assert layer.joined([Fp8Linear(one, None, torch.float32)]) is None


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [False, True])
def test_float8_products_on_a_gpu(blocks: bool) -> None:
    """Of cuBLAS, in bfloat16, beside the reference; equal bits in every trusted number of rows."""
    torch.manual_seed(5)
    made = fp8_weight(512, 1024, blocks=blocks)
    weight = Fp8Weight(made.steps_MN.cuda(), made.scales.cuda())
    if not can_multiply(weight, torch.bfloat16):
        pytest.skip("this GPU or its CUDA has no such product; weights are then plain")
    layer = Fp8Linear(weight, None, torch.bfloat16)
    rows = torch.randn(200, 1024, device="cuda", dtype=torch.bfloat16)
    found = FixedRowsLinear(layer, trusted_sizes(layer))(rows)
    steps, row_scales = to_fp8(rows.cpu(), Rounding(FP8_BLOCK if blocks else None))
    plain = reference_product(made.steps_MN, made.scales, FP8_BLOCK)
    expected = reference_product(steps, row_scales, 1) @ plain.t()
    assert float((found.cpu().double() - expected).abs().max() / expected.abs().max()) < 0.01
    assert torch.equal(found[:9], FixedRowsLinear(layer)(rows[:9]))


@pytest.mark.gpu
def test_products_are_not_cut_where_sums_are_not_split() -> None:
    """The shapes of an 8 B model's layer, which split-K would sum differently with 64 rows."""
    block = nn.ModuleDict(
        {"down": nn.Linear(14336, 4096, bias=False), "out": nn.Linear(4096, 4096)}
    )
    block = block.to("cuda", torch.bfloat16).requires_grad_(False)
    adapt_model(block, batch_invariant=True)
    for linear in block.values():
        assert isinstance(linear, FixedRowsLinear)
        assert linear.sizes[0] == 2048
    adapt_model(nn.ModuleDict(), batch_invariant=False)


def test_models_are_adapted_in_place() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 4) for _ in range(3))
            self.o_proj = nn.Linear(8, 8)
            self.norm = LlamaRMSNorm(8)
            self.other_norm = GemmaRMSNorm(8)

    for batch_invariant in (True, False):
        block = Block().to(torch.bfloat16).requires_grad_(False)
        nn.init.normal_(block.norm.weight)
        adapt_model(block, batch_invariant=batch_invariant)
        assert isinstance(block.q_proj, ProjectionPart)
        kind = FixedRowsLinear if batch_invariant else nn.Linear
        assert type(block.o_proj) is kind
        assert type(block.q_proj.shared.joined) is kind
        assert type(block.get_submodule("norm")) is NativeNorm
        # It multiplies by 1 + weight, and has no epsilon of that name.
        assert type(block.other_norm) is GemmaRMSNorm

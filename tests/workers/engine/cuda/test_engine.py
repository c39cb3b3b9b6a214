"""The CUDA package's engine: on a CPU with the reference attention, on a GPU with all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from paceline.errors import ConfigError
from tests.tiny import Architecture, make_tiny_checkpoint
from tests.workers.engine.cuda.engines import DEVICES, make_engine
from tests.workers.engine.trees import close, plain_rows, random_tree
from workers.engine.cpu.engine import CpuEngine
from workers.engine.cuda.engine import CudaEngine
from workers.engine.cuda.graphs import shapes_to_capture
from workers.engine.cuda.linears import FIXED_ROWS
from workers.engine.cuda.step import exact_shape, lay_out
from workers.engine.self_test import trees_are_invariant
from workers.engine.slices import Slice

VOCAB = 384
LENGTH = 300
TOKEN_IDS = torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
ARCHITECTURES: tuple[Architecture, ...] = ("llama", "qwen2", "qwen3")
BIG_ENOUGH = 2e-4
"""Upper bound on the difference from transformers' logits in float32."""


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp(request.param), architecture=request.param)


@pytest.fixture(scope="module", params=DEVICES)
def engine(request: pytest.FixtureRequest, folder: Path) -> CudaEngine:
    return make_engine(folder, request.param)


@pytest.fixture(scope="module")
def expected(folder: Path) -> torch.Tensor:
    """transformers' rows of the whole sequence."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits_TV: torch.Tensor = model(torch.tensor([TOKEN_IDS])).logits[0]
    return logits_TV


def near(logits: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((logits.cpu() - expected).abs().max() < BIG_ENOUGH)


def test_rows_are_those_of_transformers(engine: CudaEngine, expected: torch.Tensor) -> None:
    """At once, in parts over separate pages, in windows, and beside another sequence."""
    table, other = [5, 2], [7, 0]
    assert near(engine.step([Slice(table, 0, TOKEN_IDS, LENGTH)]), expected)
    assert engine.step([Slice(other, 0, TOKEN_IDS[:100], 0)]).shape == (0, VOCAB)
    rows = engine.step(
        [Slice(table, 290, TOKEN_IDS[290:], 4), Slice(other, 100, TOKEN_IDS[100:], 200)]
    )
    assert near(rows, torch.cat([expected[-4:], expected[100:]]))
    for start, end in ((200, 201), (201, 210), (210, 300)):
        rows = engine.step([Slice(other, start, TOKEN_IDS[start:end], end - start)])
        assert near(rows, expected[start:end])


@pytest.mark.parametrize("seed", range(3))
def test_nodes_of_a_tree_get_the_rows_of_their_paths(engine: CudaEngine, seed: int) -> None:
    """Whole, beside a chain, grown over two steps, and with tokens of the prefix in front."""
    tree = random_tree(seed, prefix_length=260, num_nodes=13, vocab_size=VOCAB)
    expected = plain_rows(engine, tree, [1, 2])
    alone = engine.step([Slice([3], 0, TOKEN_IDS[:7], 7)])
    engine.step([Slice([4, 5], 0, tree.prefix[:250], 0)])
    whole = engine.step([tree.piece([4, 5], 250, 13, 13), Slice([6], 0, TOKEN_IDS[:7], 7)])
    assert close(whole[:13], expected)
    assert close(whole[13:], alone)
    first = engine.step([tree.piece([4, 5], 259, 6, 6)])
    second = engine.step([tree.piece([4, 5], 266, 13, 7)])
    assert close(torch.cat([first, second]), expected)


def test_a_path_moved_to_its_positions_is_a_chain(engine: CudaEngine) -> None:
    tree = random_tree(4, prefix_length=255, num_nodes=9, vocab_size=VOCAB)
    engine.step(
        [
            Slice([4, 5], 0, tree.prefix, 0),
        ]
    )
    engine.step([tree.piece([4, 5], 255, 9, 9)])
    path = tree.path(8)
    engine.move_kv([([4, 5], [(255 + node, 255 + depth) for depth, node in enumerate(path)])])
    ids = [*tree.ids_to(8), 17]
    row = engine.step([Slice([4, 5], len(ids) - 1, [17], 1)])
    assert close(row, engine.step([Slice([1, 2], 0, ids, 1)]))


def decode(engine: CpuEngine | CudaEngine, count: int) -> list[int]:
    """Greedy tokens after a prompt."""
    token_ids = list(TOKEN_IDS[:40])
    table = list(range(-(-(40 + count) // engine.block_size)))
    stored = 0
    for _ in range(count):
        row = engine.step([Slice(table, stored, token_ids[stored:], 1)])
        stored = len(token_ids)
        token_ids.append(int(row[0].argmax()))
    return token_ids[40:]


def test_greedy_text_is_that_of_the_cpu_engine(engine: CudaEngine, folder: Path) -> None:
    """Float32 and clear winners, so there are no ties."""
    cpu = CpuEngine(folder, weights="float32", threads=1, kv_memory_bytes=1 << 20)
    assert decode(engine, 50) == decode(cpu, 50)


def test_logits_outlive_the_next_step(engine: CudaEngine) -> None:
    first = engine.step([Slice([0], 0, TOKEN_IDS[:5], 1)])
    before = first.clone()
    engine.step([Slice([0], 0, TOKEN_IDS[5:10], 1)])
    assert torch.equal(first, before)


def test_a_step_laid_out_in_a_larger_shape_gives_the_same_rows(engine: CudaEngine) -> None:
    """As in a graph: chains, trees, and both beside a prefill."""
    tree = random_tree(5, prefix_length=250, num_nodes=6, vocab_size=VOCAB)
    engine.step([Slice([0], 0, TOKEN_IDS[:255], 0), Slice([4, 5], 0, tree.prefix, 0)])
    chains = [Slice([0, 1], 255, TOKEN_IDS[255:262], 7), Slice([2], 0, TOKEN_IDS[:2], 1)]
    chains.append(Slice([3], 0, TOKEN_IDS[:1], 1))
    nodes = tree.piece([4, 5], 249, 6, 7)
    shapes = shapes_to_capture(max_num_seqs=4, max_step_tokens=512, fixed_rows=FIXED_ROWS)
    prefill = Slice([6], 0, TOKEN_IDS[:100], 1)
    for slices in (chains, [nodes], [chains[0], nodes, prefill]):
        expected = engine.step(slices)
        shape = next(one for one in reversed(shapes) if one.holds(exact_shape(slices)))
        assert shape.num_tokens > exact_shape(slices).num_tokens
        layout = lay_out(
            slices,
            shape,
            table_pages=engine._table_pages,
            scratch_block=engine._cache.scratch_block,
        )
        with torch.inference_mode():
            array = torch.from_numpy(layout.array).to(engine.device)
            rows = engine._run(array, layout)[: len(layout.logit_rows)]
        assert close(rows, expected)


def test_kv_is_moved_in_all_layers_at_once(engine: CudaEngine) -> None:
    """Two operations of a device move it, whatever the number of layers."""

    class Counting(TorchDispatchMode):
        def __init__(self) -> None:
            TorchDispatchMode.__init__(self)
            self.names: list[str] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> object:
            self.names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    slots = torch.tensor([[5, 300], [7, 9]], device=engine.device)
    with torch.inference_mode(), Counting() as counting:
        engine._cache.copy_slots(*slots)
    assert counting.names.count("index_select") == counting.names.count("index_copy_") == 1


def test_the_self_test_says_whether_trees_keep_the_text(
    engine: CudaEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """Without our kernels, a node's sums have another order: only the law is kept."""
    assert not trees_are_invariant(engine)
    (line,) = caplog.messages
    assert "keep the law, not the text" in line


def test_memory_that_holds_no_sequence_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"at least 196608 bytes|at least 131072 bytes"):
        make_engine(folder, "cpu", kv_memory_bytes=100_000)
    with pytest.raises(ConfigError, match="max_model_len must be from 1 to the checkpoint's 512"):
        make_engine(folder, "cpu", max_model_len=513)

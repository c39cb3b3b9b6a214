"""Trees of candidates: every node has the logits of its path, however the tree was fed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tiny import Architecture, make_tiny_checkpoint
from tests.workers.engine.trees import Tree, close, plain_rows, random_tree
from workers.engine.cpu import native, step_plan
from workers.engine.cpu.engine import CpuEngine
from workers.engine.cpu.native import runs_natively
from workers.engine.load.checkpoint import read_config
from workers.engine.slices import Slice

VOCAB = 384
TREE, PLAIN, OTHER = [7, 2, 9], [12, 13, 14], [20, 3, 4]
"""Block tables of three sequences."""
ARCHITECTURES: tuple[Architecture, ...] = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "mixtral",
)
PREFIXES = (1, 40, 120, 126, 128, 130, 250)
"""Lengths of prefixes. Some are so near the end of a block of 128 that the tree crosses it."""


@pytest.fixture(scope="module", params=ARCHITECTURES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CpuEngine:
    # Our own kernels compute whole steps of models with these sizes.
    sizes: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32}
    folder = make_tiny_checkpoint(
        tmp_path_factory.mktemp(request.param),
        architecture=request.param,
        vocab_size=VOCAB,
        **(sizes if request.param == "qwen3" else {}),
    )
    engine = CpuEngine(folder, weights="float32", threads=1, kv_memory_bytes=8 << 20)
    has_kernels = runs_natively(read_config(folder), "float32")
    assert (engine._native is not None) == has_kernels
    assert not has_kernels or request.param == "qwen3"
    return engine


def make_tree(seed: int, prefix_length: int) -> Tree:
    return random_tree(seed, prefix_length=prefix_length, num_nodes=12, vocab_size=VOCAB)


@pytest.mark.parametrize("prefix_length", PREFIXES)
def test_a_nodes_logits_are_its_paths(engine: CpuEngine, prefix_length: int) -> None:
    tree = make_tree(prefix_length, prefix_length)
    rows = engine.step([tree.piece(TREE, 0, 12, 12)])
    assert close(rows, plain_rows(engine, tree, PLAIN))


@pytest.mark.parametrize("prefix_length", PREFIXES)
def test_a_tree_may_grow_over_several_steps(engine: CpuEngine, prefix_length: int) -> None:
    tree = make_tree(prefix_length + 1000, prefix_length)
    at_once = engine.step([tree.piece(OTHER, 0, 12, 12)])
    # The first step feeds the prefix's last token and two nodes.
    if prefix_length > 1:
        engine.step([Slice(TREE, 0, tree.prefix[:-1], 0)])
    rows = [engine.step([tree.piece(TREE, prefix_length - 1, 2, 2)])]
    for first, end in ((2, 3), (3, 8), (8, 12)):
        rows.append(engine.step([tree.piece(TREE, prefix_length + first, end, end - first)]))
    assert torch.equal(torch.cat(rows), at_once)


@pytest.mark.parametrize("prefix_length", PREFIXES)
def test_decoding_goes_on_from_an_accepted_path(engine: CpuEngine, prefix_length: int) -> None:
    tree = make_tree(prefix_length + 2000, prefix_length)
    engine.step([tree.piece(TREE, 0, 12, 12)])
    path = tree.path(11)
    moves = [(prefix_length + node, prefix_length + depth) for depth, node in enumerate(path)]
    engine.move_kv([(TREE, moves)])
    ids = tree.ids_to(11)
    rows = engine.step([Slice(TREE, len(ids), [5, 6, 7], 3)])
    engine.step([Slice(PLAIN, 0, ids, 0)])
    assert close(rows, engine.step([Slice(PLAIN, len(ids), [5, 6, 7], 3)]))
    if moves != [(to, to) for _, to in moves]:
        engine.step([tree.piece(TREE, 0, 12, 12)])
        assert not close(engine.step([Slice(TREE, len(ids), [5, 6, 7], 3)]), rows)


@pytest.mark.parametrize("prefix_length", [40, 126])
def test_slices_with_and_without_trees_share_a_step(engine: CpuEngine, prefix_length: int) -> None:
    first, second = make_tree(1, prefix_length), make_tree(2, 30)
    chain = Slice(PLAIN, 0, first.prefix[:20], 20)
    alone = [
        engine.step([piece])
        for piece in (first.piece(TREE, 0, 12, 13), chain, second.piece(OTHER, 0, 12, 12))
    ]
    engine.step([Slice(TREE, 0, first.prefix, 0), Slice(OTHER, 0, second.prefix, 0)])
    together = engine.step(
        [
            first.piece(TREE, prefix_length - 1, 12, 13),
            chain,
            second.piece(OTHER, 30, 12, 12),
        ]
    )
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("prefix_length", [40, 126])
def test_a_chain_given_as_parents_has_the_plain_bits(engine: CpuEngine, prefix_length: int) -> None:
    ids = make_tree(3, prefix_length + 10).prefix
    chain = Tree(ids[:prefix_length], ids[prefix_length:], tuple(range(10)))
    plain = engine.step([Slice(PLAIN, 0, ids, 10)])
    assert torch.equal(engine.step([chain.piece(TREE, 0, 10, 10)]), plain)


def test_nodes_in_the_slots_of_their_positions_have_the_plain_bits(engine: CpuEngine) -> None:
    ids = make_tree(4, 125).prefix
    # Nodes 0 to 4 are a chain, 5 to 7 hang beside it.
    tree = Tree(ids[:120], [*ids[120:], 9, 8, 7], (0, 1, 2, 3, 4, 0, 6, 2))
    rows = engine.step([tree.piece(TREE, 0, 8, 8)])
    assert torch.equal(rows[:5], engine.step([Slice(PLAIN, 0, ids, 5)]))


def test_a_mask_that_shows_siblings_is_found(
    engine: CpuEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = Tree(make_tree(5, 40).prefix, [1, 2, 3], (0, 0, 2))
    expected = plain_rows(engine, tree, PLAIN)
    assert close(engine.step([tree.piece(TREE, 0, 3, 3)]), expected)

    def show_all(piece: Slice, num_slots: int) -> torch.Tensor:
        return torch.zeros(len(piece.token_ids), num_slots, dtype=torch.bool)

    for module in (step_plan, native):
        monkeypatch.setattr(module, "unrelated_slots", show_all)
    rows = engine.step([tree.piece(TREE, 0, 3, 3)])
    assert close(rows[:1], expected[:1])
    assert not close(rows[1:2], expected[1:2])
    assert not close(rows[2:], expected[2:])


def test_a_tree_grows_level_by_level_and_a_path_of_it_is_kept(engine: CpuEngine) -> None:
    """A tree grows from its own logits, a path is moved to its positions, then plain decoding."""
    prefix = make_tree(7, 121).prefix
    nodes: list[int] = []
    parents: list[int] = []
    fed, leaves = 0, [0]
    for _ in range(4):
        # The two best continuations of every token or node of the last level.
        ids = [*prefix, *nodes][fed:]
        tree_start = len(prefix) if nodes else None
        rows = engine.step([Slice(TREE, fed, ids, len(leaves), tree_start, tuple(parents))])
        fed += len(ids)
        nodes += rows.topk(2).indices.flatten().tolist()
        parents += [leaf for leaf in leaves for _ in range(2)]
        leaves = list(range(len(parents) - 2 * len(leaves) + 1, len(parents) + 1))
    path = [1, 4, 10, 23]
    ids = [*prefix, *(nodes[node] for node in path)]
    # The last level was never fed.
    moves = [(len(prefix) + node, len(prefix) + depth) for depth, node in enumerate(path[:3])]
    engine.move_kv([(TREE, moves)])
    rows = engine.step([Slice(TREE, len(ids) - 1, ids[-1:], 1)])
    assert close(rows, engine.step([Slice(PLAIN, 0, ids, 1)]))


def test_moves_are_made_in_order(engine: CpuEngine) -> None:
    """The result equals copying one pair after another, even if one reads what another wrote.

    Two sequences are moved in one call.
    """
    tables = (TREE, OTHER)
    tree = make_tree(6, 126)
    engine.step([tree.piece(table, 0, 12, 0) for table in tables])
    moves = {0: [(128, 127), (127, 126), (131, 128), (128, 130)], 1: [(133, 126), (129, 127)]}
    keys = [layer.slots_2HSD for layer in engine._cache.layers]
    slots = torch.arange(126, 134)
    where = [torch.tensor(table)[slots // 128] * 128 + slots % 128 for table in tables]
    before = [[layer[:, places].clone() for places in where] for layer in keys]
    engine.move_kv([(tables[number], pairs) for number, pairs in moves.items()])
    for layer, copies in zip(keys, before, strict=True):
        for number, old in enumerate(copies):
            for source, target in moves[number]:
                old[:, target - 126] = old[:, source - 126]
            assert torch.equal(layer[:, where[number]], old)


@pytest.mark.parametrize("parents", [(0,), (0, 2), (0, -1), (0, 0, 0)])
def test_parents_that_make_no_tree_are_caught(engine: CpuEngine, parents: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match="parent"):
        engine.step([Slice(TREE, 0, [1, 2, 3], 1, 1, parents)])

"""Captured steps of ranks: after each meeting anew, never alone, and gone with the connections.

On CPUs a stand-in takes the place of graphs (repeating.py), over gloo. One GPU shows the rest over
NCCL, with a group of one rank.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import WorkerLostError
from tests.tiny import make_tiny_checkpoint
from tests.workers.engine.cuda.engines import make_engine, make_rank
from tests.workers.engine.cuda.repeating import Recorders, stand_in_for_graphs
from tests.workers.engine.parallel.ranks import Ranks
from tests.workers.engine.trees import random_tree
from workers.engine.cuda import engine as engine_module
from workers.engine.cuda.engine import CudaEngine
from workers.engine.cuda.graphs import TRIAL
from workers.engine.cuda.step import Shape
from workers.engine.forward import LayerOperations, choose_forward
from workers.engine.parallel.group import RankGroup
from workers.engine.parallel.sharding import Sharding
from workers.engine.slices import Slice
from workers.process import kernels

VOCAB = 302
TOKEN_IDS = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(2)).tolist()
TOLERANCE = 2e-4


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> Recorders:
    # Few shapes: each is computed once at each rank.
    return stand_in_for_graphs(monkeypatch, [TRIAL, Shape(4, 64, num_rows=64)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(
        tmp_path_factory.mktemp("captured"), vocab_size=VOCAB, num_attention_heads=8
    )


def rows_of(engine: CudaEngine) -> torch.Tensor:
    """A prefill's row, a plain step's, those of a window, and those of a tree."""
    tree = random_tree(3, prefix_length=20, num_nodes=5, vocab_size=VOCAB)
    found = [engine.step([Slice([1], 0, TOKEN_IDS[:20], 1), Slice([2], 0, tree.prefix, 0)])]
    found.append(engine.step([Slice([1], 20, TOKEN_IDS[20:21], 1)]))
    found.append(engine.step([Slice([1], 21, TOKEN_IDS[21:25], 2), Slice([3], 0, [5], 1)]))
    found.append(engine.step([tree.piece([2], 20, 5, 5)]))
    return torch.cat(found)


def test_one_engine_replays_what_it_would_compute(folder: Path, recorders: Recorders) -> None:
    engine = make_engine(folder, "cpu")
    captured = rows_of(engine)
    assert recorders.num_replayed >= 3
    plain = rows_of(make_engine(folder, "cpu", graphs=False))
    assert (captured - plain).abs().max() < TOLERANCE


def test_ranks_capture_after_each_meeting(folder: Path, recorders: Recorders) -> None:
    plain = rows_of(make_engine(folder, "cpu", graphs=False))

    def load(group: RankGroup) -> CudaEngine:
        return make_rank(folder, group)

    with Ranks(2) as ranks:
        engines = ranks.together(load)

        def meet(name: str) -> None:
            def work(group: RankGroup) -> None:
                ranks.join(group, name)
                engines[group.place.rank].agree()

            ranks.together(work)

        def compute() -> torch.Tensor:
            rows, others = ranks.together(lambda group: rows_of(engines[group.place.rank]))
            assert others.shape[1] == 0
            return rows

        # At load each rank tries alone whether it can capture.
        assert [one.num_recorded for one in recorders.made] == [1, 1]
        for name in ("first", "second"):
            recorded, replayed = recorders.num_recorded, recorders.num_replayed
            meet(name)
            assert recorders.num_recorded - recorded >= 2 * 2
            assert recorders.made[0].num_recorded == recorders.made[1].num_recorded
            assert (compute() - plain).abs().max() < TOLERANCE
            assert recorders.num_replayed - replayed >= 2 * 3

        graphs = engines[0]._graphs
        assert graphs is not None
        # A rank that is lost in the middle of a captured step, which holds collectives.
        errors = ranks.errors(
            lambda group: group.leave() if group.place.rank else rows_of(engines[0])
        )
        assert isinstance(errors[0], WorkerLostError)
        assert errors[1] is None
        assert not graphs.is_open
        before = recorders.num_replayed
        for engine in engines:
            engine.check_computes()
        assert recorders.num_replayed == before, "a rank alone runs steps as they are"
        meet("third")
        assert (compute() - plain).abs().max() < TOLERANCE
        assert recorders.num_replayed > before


def test_no_rank_captures_if_one_cannot(
    folder: Path, recorders: Recorders, caplog: pytest.LogCaptureFixture
) -> None:
    with Ranks(2) as ranks:

        def load(group: RankGroup) -> CudaEngine:
            return make_rank(folder, group)

        first = load(ranks.groups[0])
        recorders.fail = True
        engines = [first, load(ranks.groups[1])]
        assert "the model cannot be captured: operation not permitted" in caplog.text

        def work(group: RankGroup) -> torch.Tensor:
            ranks.join(group)
            engines[group.place.rank].agree()
            return rows_of(engines[group.place.rank])

        ranks.together(work)
    assert recorders.num_replayed == 0
    assert "steps run without CUDA graphs: rank 1 cannot capture them" in caplog.text


class MarkedOperations(LayerOperations):
    """Takes the place of our kernels."""


def test_all_ranks_run_our_kernels_or_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The check fails on rank 1. Each rank is a thread here, and has kernels of its own."""
    here = threading.local()
    failed = {1}
    chosen: dict[int, list[bool]] = {0: [], 1: []}

    def give_up(device: torch.device, why: str) -> None:
        failed.add(here.rank)
        kernels.give_up_kernels(device, why)

    def choose(model: Any, step: Any, operations: LayerOperations) -> Any:
        chosen[here.rank].append(isinstance(operations, MarkedOperations))
        return choose_forward(model, step, operations)

    def operations(engine: CudaEngine) -> LayerOperations:
        return LayerOperations() if here.rank in failed else MarkedOperations()

    monkeypatch.setattr(kernels, "_failed", set())
    monkeypatch.setattr(engine_module, "can_run_kernels", lambda _: here.rank not in failed)
    monkeypatch.setattr(engine_module, "check_kernels", lambda *_: None)
    monkeypatch.setattr(engine_module, "give_up_kernels", give_up)
    monkeypatch.setattr(engine_module, "choose_forward", choose)
    monkeypatch.setattr(CudaEngine, "_operations", operations)

    def work(group: RankGroup) -> torch.Tensor:
        here.rank = group.place.rank
        engine = make_rank(folder, group)
        ranks.join(group)
        engine.agree()
        return rows_of(engine)

    with Ranks(2) as ranks:
        rows, _ = ranks.together(work)
    assert chosen == {0: [True, False], 1: [False]}
    assert failed == {0, 1}
    assert caplog.text.count("they do not run on rank 1, whose log says why") == 1
    here.rank = 0
    monkeypatch.undo()
    assert (rows - rows_of(make_engine(folder, "cpu", graphs=False))).abs().max() < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("in_kernels", [False, True])
def test_one_rank_on_a_gpu_is_captured_with_its_collectives(
    folder: Path, in_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Capture, replay, abort, a new meeting, capture. Every layer has sums: NCCL's, or kernels'."""
    monkeypatch.setattr(kernels, "_wanted", in_kernels)
    monkeypatch.setattr(Sharding, "adds_up", lambda self, module: module.endswith("_proj"))
    with Ranks(1, device_of=lambda rank: "cuda:0") as ranks:

        def load(group: RankGroup) -> CudaEngine:
            return make_rank(folder, group, dtype=torch.bfloat16)

        (engine,) = ranks.together(load)

        def work(group: RankGroup) -> torch.Tensor:
            ranks.join(group, f"meeting {len(found)}")
            assert (group.table is not None) == in_kernels
            engine.agree()
            graphs = engine._graphs
            assert graphs is not None
            assert graphs.is_open
            rows = group.settle(rows_of(engine)).cpu()
            group.leave()
            assert not graphs.is_open
            engine.check_computes()
            return rows

        found: list[torch.Tensor] = []
        for _ in range(3):
            found += ranks.together(work)
    assert all(torch.equal(rows, found[0]) for rows in found)
    plain = rows_of(make_engine(folder, "cuda", dtype=torch.bfloat16, graphs=False)).cpu()
    assert (found[0] - plain).abs().max() < 0.02 * plain.abs().max()

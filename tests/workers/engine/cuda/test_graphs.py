"""Captured steps give the logits of steps that are computed as they are.

On CPUs a stand-in takes the place of graphs (repeating.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny import make_tiny_checkpoint
from tests.workers.engine.cuda.engines import make_engine
from tests.workers.engine.cuda.repeating import Recorders, stand_in_for_graphs
from tests.workers.engine.trees import random_tree
from workers.engine.cuda.engine import CudaEngine
from workers.engine.cuda.step import Shape
from workers.engine.slices import Slice

VOCAB = 302
TOKEN_IDS = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(2)).tolist()
TOLERANCE = 2e-4


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> Recorders:
    return stand_in_for_graphs(
        monkeypatch, [Shape(2, 64, 2, 64, 128, 128), Shape(4, 64, num_rows=64)]
    )


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


def test_a_model_that_cannot_be_captured_runs_without_graphs(
    folder: Path, recorders: Recorders, caplog: pytest.LogCaptureFixture
) -> None:
    recorders.fail = True
    rows_of(make_engine(folder, "cpu"))
    assert recorders.num_replayed == 0
    assert "the model cannot be captured: operation not permitted" in caplog.text

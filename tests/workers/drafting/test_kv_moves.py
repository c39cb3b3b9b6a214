"""KV that outcomes leave in other slots is moved in one call for all sequences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from paceline.sampling import SamplingParams, SequenceSpec
from tests.tiny import make_tiny_checkpoint
from tests.workers.engine.cuda.engines import make_engine
from workers.drafting.desk import DraftingDesk
from workers.drafting.kinds.model.proposer import ModelProposer
from workers.drafting.tree import Grant
from workers.engine.slices import KvMoves

VOCAB = 302


def test_moves_of_all_trees_are_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_checkpoint(tmp_path, vocab_size=VOCAB)
    engine = make_engine(folder, "cpu", batch_invariant=False)
    drafter = ModelProposer(engine)
    desk = DraftingDesk(drafter, max_sequences=16)
    session = desk.open_session()
    calls: list[Sequence[KvMoves]] = []
    move_kv = engine.move_kv

    def counted(moves: Sequence[KvMoves]) -> None:
        calls.append(moves)
        move_kv(moves)

    def draft() -> None:
        while desk.has_work:
            desk.run_pass()
            desk.pass_took(1.0)
            desk.check_integrity()

    monkeypatch.setattr(engine, "move_kv", counted)
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        prompt = torch.randint(VOCAB, (20,), generator=generator).tolist()
        spec = SequenceSpec(SamplingParams(), seed=number, prompt_length=20)
        assert session.open(number, spec, prompt) is None
    trees = [session.trees[number] for number in range(3)]
    for number, tree in enumerate(trees):
        session.grant(number, Grant(tree.num_committed + 3, branches=3, nodes=12))
    draft()
    for number, tree in enumerate(trees):
        second = tree.children(0)[1]
        session.outcome(number, tree.num_committed, [tree.tokens[second]], ())
    moved = sum(bool(drafter._moves.get(tree)) for tree in trees)
    assert moved >= 2
    assert not calls
    for number, tree in enumerate(trees):
        session.grant(number, Grant(until_position=tree.num_committed + 3))
    draft()
    assert [len(moves) for moves in calls] == [moved]

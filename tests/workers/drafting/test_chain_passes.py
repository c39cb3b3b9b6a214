"""Several passes over chains without the host in between draft what pass after pass drafts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.options import Stopping
from paceline.sampling import SamplingParams, SequenceSpec
from tests.tiny import make_tiny_checkpoint
from tests.workers.engine.cuda.engines import make_engine
from tests.workers.engine.cuda.repeating import stand_in_for_graphs
from workers.drafting.desk import DraftingDesk
from workers.drafting.kinds.model.proposer import MOST_AT_ONCE, MOST_BESIDE, ModelProposer
from workers.drafting.tree import DraftTree, Grant
from workers.engine.cuda.engine import CudaEngine
from workers.engine.cuda.step import Shape
from workers.engine.slices import KvMoves

VOCAB = 302
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("chains"), vocab_size=VOCAB)


def load(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> CudaEngine:
    shapes = [
        Shape(2, 64, 2, 64, 128, 128),
        Shape(2, 1, num_rows=1),
        Shape(5, 9, num_rows=9),
        Shape(17, 64, num_rows=64),
    ]
    stand_in_for_graphs(monkeypatch, shapes)
    return make_engine(folder, "cpu", batch_invariant=False, chains=True, **options)


class Run:
    """A drafter with several sequences. It counts its passes and the steps of its engine."""

    def __init__(self, engine: CudaEngine, *, together: bool, max_sequences: int = 16) -> None:
        self.drafter = ModelProposer(engine)
        self.desk = DraftingDesk(self.drafter, max_sequences=max_sequences)
        self.session = self.desk.open_session()
        self.steps = 0
        self.drafted: dict[tuple[int, int], int] = {}
        self.passes: list[int] = []
        self._engine, self._together = engine, together

    def open(
        self,
        number: int,
        sampling: SamplingParams,
        *,
        length: int = 20,
        end_token_ids: tuple[int, ...] = (),
        **options: Any,
    ) -> DraftTree:
        generator = torch.Generator().manual_seed(number)
        prompt = torch.randint(VOCAB, (length,), generator=generator).tolist()
        spec = SequenceSpec(
            sampling, seed=number, prompt_length=length, end_token_ids=end_token_ids
        )
        assert self.session.open(number, spec, prompt, **options) is None
        return self.session.trees[number]

    def draft(self, *, declined: int = 0) -> None:
        """Until nothing is left to draft. `declined`: the number of sequences that are declined."""
        step, chains = self._engine.step, self._engine.chains

        def counting(*arguments: Any) -> torch.Tensor:
            self.steps += 1
            return step(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self._engine, "step", counting)
            patch.setattr(self._engine, "chains", chains if self._together else None)
            while self.desk.has_work:
                for news in self.desk.run_pass():
                    declined -= len(news.declined)
                    self.passes.append(news.passes)
                    for one in news.proposals:
                        for place, token_id in enumerate(one.token_ids, start=one.base_length):
                            self.drafted[one.sequence_id, place] = token_id
                self.desk.pass_took(1.0)
                self.desk.check_integrity()
        assert not declined


def text_of(tree: DraftTree) -> tuple[list[int], list[int], list[int]]:
    return list(tree.committed), list(tree.tokens), list(tree.parents)


def grant_all(run: Run, rooms: Sequence[int], **fields: Any) -> None:
    for number, room in enumerate(rooms):
        tree = run.session.trees[number]
        run.session.grant(number, Grant(until_position=tree.num_committed + room, **fields))


@pytest.mark.parametrize("lengths", [(254,), (20, 31, 250)], ids=["alone", "three"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["T0", "T1", "cut"])
def test_the_tokens_are_those_of_the_loop(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    sampling: SamplingParams,
    lengths: tuple[int, ...],
) -> None:
    """Rooms differ, a page ends in the middle, and outcomes agree, refuse, or leave a rest."""
    engine = load(folder, monkeypatch)
    rooms = (7, 12, 1)[: len(lengths)]
    found = []
    for together in (False, True):
        run = Run(engine, together=together)
        mixed = SAMPLINGS[1:] if sampling is SAMPLINGS[1] else [sampling]
        trees = [
            run.open(number, mixed[number % len(mixed)], length=length)
            for number, length in enumerate(lengths)
        ]
        texts = []
        for agreed in (2, 0, 5, 1):
            grant_all(run, rooms)
            run.draft()
            texts.append([text_of(tree) for tree in trees])
            assert [tree.num_nodes for tree in trees] == list(rooms)
            for number, tree in enumerate(trees):
                path = tree.tokens[1 : 1 + agreed]
                other = [] if agreed == 5 else [(tree.tokens[-1] + 1) % VOCAB]
                run.session.outcome(number, tree.num_committed, [*path, *other], ())
        found.append(texts)
        assert (max(run.passes) > 1) == together
        if together and len(lengths) == 1:
            assert max(run.passes) == min(MOST_AT_ONCE, 7)
            assert run.steps <= 2 + len(texts)
    assert found[0] == found[1]


def test_nothing_follows_an_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(folder, monkeypatch)
    first = Run(engine, together=False)
    free = first.open(0, SAMPLINGS[1])
    grant_all(first, [8])
    first.draft()
    end = free.tokens[4]
    found = []
    for together in (False, True):
        run = Run(engine, together=together)
        tree = run.open(0, SAMPLINGS[1], end_token_ids=(end,))
        grant_all(run, [8])
        run.draft()
        found.append(text_of(tree))
    assert found[0] == found[1]
    assert found[0][1][-1] == end
    assert len(found[0][1]) <= 5


def test_an_outcome_waits_for_few_passes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(load(folder, monkeypatch), together=True)
    run.open(0, SAMPLINGS[0])
    grant_all(run, [7], drafting_is_free=True)
    run.draft()
    assert max(run.passes) == MOST_BESIDE


def test_a_turn_is_short_while_other_parties_use_the_drafter(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if theirs are not ready to draft yet: an outcome may come in the middle."""
    run = Run(load(folder, monkeypatch), together=True)
    tree = run.open(0, SAMPLINGS[0])
    other = run.desk.open_session()
    assert other.open(0, tree.spec, tree.committed) is None
    grant_all(run, [7])
    run.draft()
    assert max(run.passes) == MOST_BESIDE
    other.close(0)
    run.session.outcome(0, tree.num_committed, tree.tokens[1:], ())
    grant_all(run, [7])
    run.draft()
    assert max(run.passes) == 7


@pytest.mark.parametrize(
    "needs_the_host",
    [
        {"stopping": Stopping.COST},
        {"vocab_size": VOCAB - 1},
        {"sampling": SamplingParams(presence_penalty=0.5)},
        {"branches": 2},
    ],
    ids=lambda one: next(iter(one)),
)
def test_a_tree_that_needs_the_host_has_it_after_each_pass(
    folder: Path, monkeypatch: pytest.MonkeyPatch, needs_the_host: dict[str, Any]
) -> None:
    """So do the chains of the same pass."""
    engine = load(folder, monkeypatch)
    options = dict(needs_the_host)
    branches = options.pop("branches", 1)
    sampling = options.pop("sampling", SAMPLINGS[1])
    run = Run(engine, together=True)
    run.open(0, SAMPLINGS[1])
    run.open(1, sampling, **options)
    # Read the prompts: a pass that reads one is alone.
    for number, tree in run.session.trees.items():
        run.session.grant(number, Grant(until_position=tree.num_committed + 1, nodes=1))
    run.draft()
    for number, tree in run.session.trees.items():
        run.session.grant(
            number,
            Grant(
                until_position=tree.num_committed + 5, branches=branches if number else 1, nodes=5
            ),
        )
    assert all(tree.ready for tree in run.session.trees.values())
    while all(tree.ready for tree in run.session.trees.values()):
        (news,) = run.desk.run_pass()
        assert news.passes == 1


def test_full_memory_means_pass_after_pass(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both chains grow to the end of their blocks, then one makes room for the other."""
    engine = load(folder, monkeypatch)
    engine.num_blocks = 2
    found = []
    for together in (False, True):
        run = Run(engine, together=together)
        for number in range(2):
            run.open(number, SAMPLINGS[1], length=254)
        grant_all(run, [7, 7])
        run.draft(declined=1)
        assert run.passes[:2] == [1, 1]
        found.append(run.drafted)
    assert found[0] == found[1]


def test_moves_of_all_trees_are_one_call(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(folder, monkeypatch)
    run = Run(engine, together=True)
    calls: list[Sequence[KvMoves]] = []
    move_kv = engine.move_kv

    def counted(moves: Sequence[KvMoves]) -> None:
        calls.append(moves)
        move_kv(moves)

    monkeypatch.setattr(engine, "move_kv", counted)
    trees = [run.open(number, SAMPLINGS[1]) for number in range(3)]
    for number, tree in enumerate(trees):
        run.session.grant(number, Grant(tree.num_committed + 3, branches=3, nodes=12))
    run.draft()
    for number, tree in enumerate(trees):
        second = tree.children(0)[1]
        run.session.outcome(number, tree.num_committed, [tree.tokens[second]], ())
    moved = sum(bool(run.drafter._moves.get(tree)) for tree in trees)
    assert moved >= 2
    assert not calls
    grant_all(run, [3, 3, 3])
    run.draft()
    assert [len(moves) for moves in calls] == [moved]

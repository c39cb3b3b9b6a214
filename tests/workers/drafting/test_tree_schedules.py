"""Trees of the model drafter in random schedules, as a driver sees them from messages alone."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.options import Stopping
from paceline.sampling import SamplingParams, SequenceSpec
from tests.tiny import make_tiny_checkpoint
from tests.workers.drafting.mirror import (
    BLOCK_BYTES,
    MAX_LEN,
    MOST_BRANCHES,
    RULES,
    VOCAB_SIZE,
    Computes,
    FreshDrafter,
    Mirror,
)
from workers.drafting.desk import DraftingDesk, DraftingSession
from workers.drafting.fanout import RANKS
from workers.drafting.kinds.model.proposer import ModelProposer
from workers.drafting.kinds.model.translation import Translation
from workers.drafting.tree import Grant
from workers.engine.cpu.engine import CpuEngine


def _spec(random: Random, rule: str, prompt_length: int) -> SequenceSpec:
    sampling = random.choice(
        [
            SamplingParams(temperature=0.0),
            SamplingParams(temperature=0.7, top_k=3),
            SamplingParams(temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.5),
        ]
    )
    ends = random.choice([(), tuple(range(0, VOCAB_SIZE, 5))])
    return SequenceSpec(sampling, random.randrange(3), prompt_length, end_token_ids=ends, rule=rule)


ACTIONS = {"pass": 20, "outcome": 5, "grant": 5, "open": 0.4, "close": 0.2}


class Translating(ModelProposer):
    """Computes also what a drafter without history would, of the tokens that this one fed."""

    def __init__(self, engine: CpuEngine, fresh: FreshDrafter, pair: Translation) -> None:
        super().__init__(engine, translation=pair)
        self._fresh, self._pair = fresh, pair

    def logits(self, prefix: tuple[int, ...]) -> torch.Tensor:
        (own,) = {
            (*held.kv.text.token_ids, *held.kv.text.of(prefix[tree.num_committed :]))
            for tree, held in self._held.items()
            if prefix[: tree.num_committed] == tuple(tree.committed)
        }
        return self._pair.rows(self._fresh.logits(own)[None])[0]


def _run_schedule(proposer: ModelProposer, fresh: Computes, random: Random) -> None:
    desk = DraftingDesk(proposer, max_sequences=2)
    session = desk.open_session()
    mirrors: dict[int, Mirror] = {}
    for _ in range(80):
        sequence_id = random.randrange(2)
        mirror = mirrors.get(sequence_id)
        (action,) = random.choices(list(ACTIONS), list(ACTIONS.values()))
        if action == "open" or mirror is None:
            _open(fresh, random, session, mirrors, sequence_id)
        elif action == "outcome":
            committed = _outcome(random, mirror)
            session.outcome(sequence_id, len(mirror.root.prefix), committed)
            mirror.commit(committed)
        elif action == "grant":
            _grant(random, session, sequence_id, mirror)
        elif action == "close":
            session.close(sequence_id)
            del mirrors[sequence_id]
        elif desk.has_work:
            _run_pass(random, desk, mirrors)
        desk.check_integrity()
    for _ in range(200):
        if desk.has_work:
            _run_pass(random, desk, mirrors)
            desk.check_integrity()
    assert not desk.has_work, "passes go on for ever"
    for mirror in mirrors.values():
        mirror.check()
    desk.close_session(session)
    desk.check_integrity()


def _open(
    fresh: Computes,
    random: Random,
    session: DraftingSession,
    mirrors: dict[int, Mirror],
    sequence_id: int,
) -> None:
    length = random.choice([1, 2, 9, 33, 120, 126, MAX_LEN - 4])
    prompt = [random.randrange(VOCAB_SIZE) for _ in range(length)]
    spec = _spec(random, random.choice(RULES), length)
    stopping = random.choice([Stopping.FIXED, *Stopping])
    mirrors.pop(sequence_id, None)
    if session.open(sequence_id, spec, prompt, stopping=stopping) is None:
        mirrors[sequence_id] = Mirror(spec, prompt, fresh)


def _grant(random: Random, session: DraftingSession, sequence_id: int, mirror: Mirror) -> None:
    branches = 1 if mirror.spec.rule == "rejection" else random.randint(1, MOST_BRANCHES)
    if mirror.max_branches > 1:
        branches = random.choice([branches, mirror.max_branches])
    fan_out = random.choice([0, 0, 3, 8]) if mirror.spec.rule == "coupled" else 0
    if fan_out:
        mirror.max_branches = max(mirror.max_branches, 1 + RANKS)
    grant = Grant(
        until_position=len(mirror.root.prefix) + random.choice([0, 1, 3, 6, 9, 12]),
        branches=branches,
        nodes=random.choice([0, 1, 4, 9, 20, 40]),
        tokens_per_ms=random.choice([0.0, 0.01, 1.0]),
        step_ms_per_candidate=random.choice([0.0, 0.5]),
        drafting_is_free=random.random() < 0.5,
        fan_out=fan_out,
        share=random.choice([0, 1]),
        shares=2,
    )
    mirror.grant = grant
    mirror.told_last = False
    mirror.max_branches = max(mirror.max_branches, branches)
    session.grant(sequence_id, grant)


def _outcome(random: Random, mirror: Mirror) -> list[int]:
    """An outcome along a path of the tree, then perhaps another token."""
    node, tokens = mirror.root, []
    while node.children and random.random() < 0.7:
        node = random.choice(node.children)
        tokens.append(node.token_id)
    others = random.choice([0, 1, 1, 2]) if tokens else 1
    return tokens + [random.randrange(VOCAB_SIZE) for _ in range(others)]


def _run_pass(random: Random, desk: DraftingDesk, mirrors: dict[int, Mirror]) -> None:
    for news in desk.run_pass():
        for proposal in news.proposals:
            mirrors[proposal.sequence_id].take(proposal)
            mirrors[proposal.sequence_id].check()
        for declined in news.declined:
            assert declined.reason
            del mirrors[declined.sequence_id]
    desk.pass_took(random.random() * 10)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_trees_are_what_a_fresh_drafter_would_draw(
    engine: CpuEngine, fresh: FreshDrafter, seed: int
) -> None:
    _run_schedule(ModelProposer(engine), fresh, Random(seed))


@pytest.fixture(scope="module")
def of_another_vocabulary(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Path
) -> dict[str, Translating]:
    """Drafters whose tokens are shorter or longer than those of the target."""
    folder, made = tmp_path_factory.mktemp("others"), {}
    for name, size in (("shorter", 270), ("longer", 384)):
        other = make_tiny_checkpoint(
            folder / name, vocab_size=size, max_position_embeddings=MAX_LEN
        )
        engines = [
            CpuEngine(other, threads=1, kv_memory_bytes=count * BLOCK_BYTES) for count in (4, 2)
        ]
        pair = Translation(other, size, checkpoint)
        made[name] = Translating(engines[0], FreshDrafter(engines[1]), pair)
    return made


@pytest.mark.parametrize("name", ["shorter", "longer"])
@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_trees_in_another_vocabulary(
    of_another_vocabulary: dict[str, Translating], name: str, seed: int
) -> None:
    proposer = of_another_vocabulary[name]
    _run_schedule(proposer, proposer, Random(seed))

"""Sequences that begin alike read the same KV. Their drafts have the bits of those without it."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch

from tests.workers.drafting.long_prompts import MAX_LEN, SIZE, kv_of, spec, tokens
from tests.workers.drafting.mirror import BLOCK_BYTES, RULES, VOCAB_SIZE
from workers.drafting.desk import DraftingDesk, DraftingSession
from workers.drafting.kinds.model.proposer import ModelProposer
from workers.drafting.tree import DraftTree, Grant
from workers.engine.cpu.engine import CpuEngine
from workers.engine.local_cache import LocalSequence
from workers.engine.slices import Slice


@pytest.fixture(scope="module")
def other_engine(long_folder: Path) -> CpuEngine:
    """An engine with the same weights and its own KV."""
    return CpuEngine(long_folder, threads=1, kv_memory_bytes=15 * BLOCK_BYTES)


def _fed_until_idle(desk: DraftingDesk) -> int:
    """Run all passes. Returns the number of fed tokens."""
    fed = 0
    while desk.has_work:
        fed += max((news.tokens_fed for news in desk.run_pass()), default=0)
    desk.check_integrity()
    return fed


def _fed(
    desk: DraftingDesk, session: DraftingSession, number: int, prompt: list[int], tenant: str = ""
) -> int:
    """Open a sequence and draft one token for it. Returns the number of fed tokens."""
    assert session.open(number, spec(len(prompt)), prompt, tenant=tenant) is None
    session.grant(number, Grant(len(prompt) + 1))
    return _fed_until_idle(desk)


def test_whole_blocks_are_fed_once_for_each_tenant(long_engine: CpuEngine) -> None:
    random = Random(1)
    shared, end = tokens(random, 2 * SIZE), tokens(random, 10)
    desk = DraftingDesk(ModelProposer(long_engine), max_sequences=9)
    session = desk.open_session()
    other = desk.open_session()
    assert _fed(desk, session, 1, [*shared, *end]) == 2 * SIZE + 10
    assert _fed(desk, session, 2, [*shared, *end[5:]]) == 5, "while the first is open"
    session.close(1)
    session.close(2)
    desk.check_integrity()
    assert _fed(desk, session, 3, [*shared, *end]) == 10, "after they ended, and the end is its own"
    assert _fed(desk, other, 3, shared) == SIZE, "of another stream; the last token is always fed"
    assert _fed(desk, session, 4, [*shared, *end], "x") == 2 * SIZE + 10, "of another tenant"
    assert _fed(desk, session, 5, [*shared, *end], "x") == 10
    changed = [*shared[: SIZE - 1], (shared[SIZE - 1] + 1) % VOCAB_SIZE, *shared[SIZE:]]
    assert _fed(desk, session, 6, changed) == 2 * SIZE, "equal blocks after others are not equal"
    desk.close_session(session)
    desk.close_session(other)
    desk.check_integrity()


def test_without_it_everything_is_fed(long_engine: CpuEngine) -> None:
    prompt = tokens(Random(2), SIZE + 3)
    desk = DraftingDesk(ModelProposer(long_engine, prefix_cache=False), max_sequences=9)
    session = desk.open_session()
    assert [_fed(desk, session, number, prompt) for number in (1, 2)] == [SIZE + 3] * 2


def test_what_was_drafted_is_found_once_it_is_committed(long_engine: CpuEngine) -> None:
    desk = DraftingDesk(ModelProposer(long_engine), max_sequences=9)
    session = desk.open_session()
    prompt = tokens(Random(3), SIZE - 4)
    session.open(1, spec(len(prompt)), prompt)
    session.grant(1, Grant(SIZE + 4))
    _fed_until_idle(desk)
    drafted = session.trees[1].tokens[1:]
    assert _fed(desk, session, 2, [*prompt, *drafted]) == SIZE + 4, "not while it is a guess"
    session.close(2)
    session.outcome(1, len(prompt), drafted)
    assert _fed(desk, session, 3, [*prompt, *drafted, 7]) == 5


def test_requests_that_come_together_feed_what_they_share_once(long_engine: CpuEngine) -> None:
    random = Random(4)
    shared = tokens(random, 2 * SIZE)
    desk = DraftingDesk(ModelProposer(long_engine), max_sequences=9)
    session = desk.open_session()
    for number in range(3):
        prompt = [*shared, *tokens(random, 20)]
        session.open(number, spec(len(prompt)), prompt)
        session.grant(number, Grant(len(prompt) + 1))
    assert _fed_until_idle(desk) == 2 * SIZE + 3 * 20
    tables = [kv.block_table for kv in kv_of(desk).values()]
    assert len({tuple(table[:2]) for table in tables}) == 1
    desk.close_session(session)


def test_the_longest_unused_block_makes_room(long_engine: CpuEngine) -> None:
    random = Random(5)
    desk = DraftingDesk(ModelProposer(long_engine), max_sequences=99)
    session = desk.open_session()
    prompts = [tokens(random, 3 * SIZE) for _ in range(6)]
    for prompt in prompts:  # 15 blocks keep two whole ones of each of these and more
        _fed(desk, session, 1, prompt)
        session.close(1)
    _fed(desk, session, 1, prompts[0])
    session.close(1)
    for prompt in [tokens(random, 3 * SIZE) for _ in range(3)]:
        _fed(desk, session, 1, prompt)
        session.close(1)
    assert _fed(desk, session, 1, prompts[0]) == SIZE, "it was used lately"
    assert _fed(desk, session, 2, prompts[1]) == 3 * SIZE
    for number in (10, 11):
        _fed(desk, session, number, tokens(random, 500))
    refused = session.open(12, spec(MAX_LEN - 1), tokens(random, 511))
    assert refused is not None
    assert "KV memory is full" in refused.reason, "what is read or written is not taken away"
    desk.check_integrity()


Seen = list[object]


def _contents(tree: DraftTree) -> Seen:
    """Everything that a driver may be told of a tree, with floats to the bit."""
    distributions = {
        node: (sparse.token_ids_M.tolist(), sparse.probs_M.tolist())
        for node, sparse in tree.distributions.items()
    }
    return [list(tree.committed), list(tree.tokens), list(tree.parents), distributions]


def _run_schedule(engine: CpuEngine, random: Random, rule: str, *, prefix_cache: bool) -> Seen:
    """All drafts in the order of the schedule, whose choices do not depend on the cache."""
    desk = DraftingDesk(ModelProposer(engine, prefix_cache=prefix_cache), max_sequences=3)
    session = desk.open_session()
    shared = tokens(random, 3 * SIZE)
    branches = 1 if rule == "rejection" else 3
    seen: Seen = []
    for _ in range(40):
        number = random.randrange(3)
        tree = session.trees.get(number)
        if tree is None or random.random() < 0.2 or tree.num_committed > MAX_LEN - 80:
            prompt = [*shared[: random.randrange(1, 3 * SIZE)], *tokens(random, 9)]
            tenant = random.choice(["", "x"])
            assert session.open(number, spec(len(prompt), rule), prompt, tenant=tenant) is None
        elif random.random() < 0.7:
            depth = random.randrange(1, 12)
            nodes = 4 if branches == 1 else random.randrange(4, 24)
            session.grant(number, Grant(tree.num_committed + depth, branches, nodes))
            if random.random() < 0.8:
                _fed_until_idle(desk)
                seen += [(key, _contents(one)) for key, one in session.trees.items()]
        else:
            session.outcome(number, tree.num_committed, _committed(random, tree))
            _check_kv(desk, session, engine)
    desk.close_session(session)
    desk.check_integrity()
    return seen


def _committed(random: Random, tree: DraftTree) -> list[int]:
    """A path of the tree and one more token, or a text from elsewhere."""
    if random.random() < 0.2:
        return tokens(random, random.randrange(1, 60))
    node = random.randrange(len(tree.tokens))
    return [*(tree.tokens[step] for step in tree.path_to(node)), random.randrange(VOCAB_SIZE)]


_fresh: dict[int, CpuEngine] = {}


def _check_kv(desk: DraftingDesk, session: DraftingSession, engine: CpuEngine) -> None:
    """Check that shared KV has the bits of feeding all tokens at once."""
    for tree in session.trees.values():
        sequence: LocalSequence = kv_of(desk)[tree]._sequence
        count = sequence._num_offered
        if not count:
            continue
        fresh = _fresh[id(engine)]
        fresh.step([Slice(range(count), 0, tree.committed[: count * SIZE], 1)])
        for own, other in zip(engine._cache.layers, fresh._cache.layers, strict=True):
            table = torch.tensor(sequence.block_table[:count])
            assert torch.equal(own.keys_NHBD[table], other.keys_NHBD[:count]), "keys differ"
            assert torch.equal(own.values_NHBD[table], other.values_NHBD[:count]), "values differ"


def test_eight_bit_weights_draft_the_same(long_folder: Path) -> None:
    """Drafters use such weights. (With 4 bits, a row's bits depend on the rows beside it.)"""
    engines = [
        CpuEngine(long_folder, weights="int8", threads=1, kv_memory_bytes=15 * BLOCK_BYTES)
        for _ in range(2)
    ]
    _fresh[id(engines[0])] = engines[1]
    with_it, without = (
        _run_schedule(engines[0], Random(1), "rejection", prefix_cache=cached)
        for cached in (True, False)
    )
    assert with_it == without


@pytest.mark.parametrize("rule", RULES)
def test_drafts_are_to_the_bit_what_they_are_without(
    long_engine: CpuEngine, other_engine: CpuEngine, rule: str
) -> None:
    _fresh[id(long_engine)] = other_engine
    for seed in range(3):
        with_it, without = (
            _run_schedule(long_engine, Random(seed), rule, prefix_cache=cached)
            for cached in (True, False)
        )
        assert with_it == without, f"seed {seed}"


def _grow_by_second_guesses(engine: CpuEngine) -> int:
    """Grow a sequence with mostly moved paths to a full block. Returns the number of offers."""
    desk = DraftingDesk(ModelProposer(engine), max_sequences=1)
    session = desk.open_session()
    prompt = tokens(Random(6), SIZE - 12)
    session.open(1, spec(len(prompt)), prompt)
    tree = session.trees[1]
    while tree.num_committed <= SIZE + 1:
        session.grant(1, Grant(tree.num_committed + 6, 3, 20))
        _fed_until_idle(desk)
        deepest = max(range(len(tree.tokens)), key=lambda node: (tree.depth(node), node))
        path = [tree.tokens[step] for step in tree.path_to(deepest)]
        session.outcome(1, tree.num_committed, path)
    session.grant(1, Grant(tree.num_committed + 1))
    _fed_until_idle(desk)
    _check_kv(desk, session, engine)
    (kv,) = kv_of(desk).values()
    offered = kv._sequence._num_offered
    desk.close_session(session)
    return offered


def test_kv_that_was_moved_is_not_shared(
    long_engine: CpuEngine, other_engine: CpuEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fresh[id(long_engine)] = other_engine
    assert _grow_by_second_guesses(long_engine) == 0
    # Negative control: it differs in the last bits.
    monkeypatch.setattr(LocalSequence, "mark_moved", lambda self, slot: None)
    with pytest.raises(AssertionError, match="differ"):
        _grow_by_second_guesses(long_engine)

"""The kind `parallel`: a pass drafts what each row says, and keeps KV of text alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paceline.errors import CheckpointError
from paceline.prefix_hash import hash_prefix
from paceline.sampling import SamplingParams, SequenceSpec
from tests.tiny import make_tiny_checkpoint
from workers.drafting.desk import DraftingDesk
from workers.drafting.kind import DRAFTERS, DrafterOptions
from workers.drafting.kinds.parallel import mask_token_of, rows_each
from workers.drafting.kinds.parallel.proposer import ParallelProposer
from workers.drafting.tree import Grant
from workers.engine.cpu.engine import CpuEngine
from workers.engine.slices import Slice
from workers.verification.choice import choose_token

MASK = 7
PROMPT = [5, 6, 9, 30, 31, 40, 3]
SPEC = SequenceSpec(SamplingParams(), seed=3, prompt_length=len(PROMPT))


def _make(folder: Path, **keys: object) -> Path:
    """A checkpoint in the form of published PARD checkpoints: `pard_token` in config.json."""
    make_tiny_checkpoint(folder, max_position_embeddings=256)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _make(tmp_path_factory.mktemp("pard"), pard_token=MASK)


@pytest.fixture(scope="module")
def engine(folder: Path) -> CpuEngine:
    return CpuEngine(folder, threads=1, kv_memory_bytes=4 * 1024 * 1024)


def _rows(engine: CpuEngine, token_ids: list[int], count: int) -> torch.Tensor:
    """The logits of `count` tokens after a text: by the text, then by mask tokens."""
    fed = [*token_ids, *[MASK] * (count - 1)]
    return engine.step([Slice([engine.num_blocks - 1, engine.num_blocks - 2], 0, fed, count)])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_pass_drafts_a_token_from_each_row(engine: CpuEngine, temperature: float) -> None:
    spec = SequenceSpec(SamplingParams(temperature=temperature), seed=3, prompt_length=len(PROMPT))
    rows = _rows(engine, PROMPT, 6)
    expected: list[int] = []
    for logits_V in rows:
        expected.append(choose_token(logits_V, spec, [*PROMPT, *expected]))
    desk = DraftingDesk(ParallelProposer(engine, MASK, parallel_tokens=6), max_sequences=2)
    session = desk.open_session()
    session.open(1, spec, PROMPT)
    session.grant(1, Grant(len(PROMPT) + 12))
    (news,) = desk.run_pass()
    desk.check_integrity()
    (proposal,) = news.proposals
    assert list(proposal.token_ids) == expected
    assert proposal.base_hash == hash_prefix(PROMPT)
    # The next pass goes on after what was drafted; the tokens of mask rows are in no KV.
    (news,) = desk.run_pass()
    desk.check_integrity()
    text = [*PROMPT, *expected]
    more: list[int] = []
    for logits_V in _rows(engine, text, 6):
        more.append(choose_token(logits_V, spec, [*text, *more]))
    assert list(news.proposals[0].token_ids) == more
    # And after a verdict on a part of it.
    session.outcome(1, len(PROMPT), [*expected[:2], 99])
    session.grant(1, Grant(len(PROMPT) + 7))
    text = [*PROMPT, *expected[:2], 99]
    (news,) = desk.run_pass()
    desk.check_integrity()
    again: list[int] = []
    for logits_V in _rows(engine, text, 4):
        again.append(choose_token(logits_V, spec, [*text, *again]))
    assert list(news.proposals[0].token_ids) == again


@pytest.mark.parametrize("grant", [Grant(15, fan_out=6, nodes=60), Grant(15, branches=3, nodes=24)])
def test_one_pass_continues_every_branch(engine: CpuEngine, grant: Grant) -> None:
    """Each node's candidates are those of the row that its place gives."""
    proposer = ParallelProposer(engine, MASK, parallel_tokens=4)
    fed: list[int] = []
    step = engine.step
    desk = DraftingDesk(proposer, max_sequences=1)
    session = desk.open_session()
    session.open(1, SPEC, PROMPT)
    session.grant(1, grant)

    def counted(pieces: list[Slice]) -> torch.Tensor:
        fed.append(sum(piece.num_logits for piece in pieces))
        return step(pieces)

    engine.step = counted  # type: ignore[method-assign, assignment]
    try:
        while desk.has_work:
            desk.run_pass()
            desk.check_integrity()
    finally:
        del engine.step
    tree = session.trees[1]
    assert not tree.is_chain
    deepest = max(tree.depth(node) for node in range(1, tree.end + 1))
    assert deepest > 4
    assert len(fed) < tree.num_nodes / 2, "several tokens a pass"
    assert max(fed) > 4, "several branches in one pass"
    # The first branch off the root is continued by its own pass, from its own text.
    branch = tree.children(0)[1]
    if tree.children(branch):
        (own,) = _rows(engine, [*PROMPT, tree.tokens[branch]], 1)
        child = tree.children(branch)[0]
        assert tree.tokens[child] == choose_token(own, SPEC, [*PROMPT, tree.tokens[branch]])


def test_rows_are_fewer_for_a_free_chain_and_for_many_nodes() -> None:
    chain = Grant(40, drafting_is_free=True)
    assert [rows_each(most, 1, chain) for most in (1, 2, 8)] == [1, 1, 4]
    assert rows_each(8, 1, Grant(40)) == 8
    branches = Grant(40, drafting_is_free=True, fan_out=63)
    assert [rows_each(8, nodes, branches) for nodes in (1, 16, 64, 200)] == [8, 8, 2, 1]


def test_a_long_prompt_is_read_in_pieces_beside_others(engine: CpuEngine) -> None:
    desk = DraftingDesk(ParallelProposer(engine, MASK), max_sequences=2)
    session = desk.open_session()
    long = [3 + number % 90 for number in range(200)]
    for number, prompt in ((1, long), (2, PROMPT)):
        session.open(number, SequenceSpec(SamplingParams(), 0, len(prompt)), prompt)
        session.grant(number, Grant(len(prompt) + 8))
    news = [desk.run_pass() for _ in range(2)]
    desk.check_integrity()
    lengths = [{one.sequence_id: len(one.token_ids) for one in new[0].proposals} for new in news]
    assert lengths == [{2: 8}, {1: 8}]


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({}, "expected the mask token"),
        ({"pard_token": 9999}, "below vocab_size"),
        ({"pard_token": "<mask>"}, "below vocab_size"),
    ],
)
async def test_a_checkpoint_without_its_mask_token_is_refused(
    tmp_path: Path, keys: dict[str, object], why: str
) -> None:
    folder = _make(tmp_path / "bad", **keys)
    kind = DRAFTERS.get("parallel", field="kind")
    options = kind.with_defaults(DrafterOptions("parallel", folder=folder))
    with pytest.raises(CheckpointError, match=why):
        kind.check(options)
    with pytest.raises(CheckpointError, match=why):
        await kind.load(options)


async def test_a_published_checkpoint_loads_as_it_is(folder: Path) -> None:
    assert mask_token_of(folder) == MASK
    kind = DRAFTERS.get("parallel", field="kind")
    options = kind.with_defaults(DrafterOptions("parallel", folder=folder))
    kind.check(options)
    proposer = await kind.load(options)
    assert (proposer.info.kind, proposer.info.max_position) == ("parallel", 256)

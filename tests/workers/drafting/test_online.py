"""A drafter that learns from a tenant's texts drafts them better, and nobody else's otherwise."""

from __future__ import annotations

import pytest
import torch

from paceline.prefix_hash import hash_prefix
from paceline.sampling import SamplingParams, SequenceSpec
from tests.tiny import make_tiny_checkpoint
from tests.workers.drafting.mirror import VOCAB_SIZE
from workers.drafting import online
from workers.drafting.desk import DraftingDesk
from workers.drafting.kinds.model.proposer import ModelProposer
from workers.drafting.online import OnlineLearning
from workers.drafting.tree import ROOT, DraftTree, Grant, Kept
from workers.engine.cpu.engine import CpuEngine
from workers.engine.slices import Slice
from workers.verification.draws import draw_chain_token, of_node

LENGTH = 200
CYCLE = [3, 9, 14, 21, 8, 30, 44, 17, 5, 60, 33, 71, 12]
"""The tokens that the texts of these tests repeat."""


@pytest.fixture(scope="module")
def wide_engine(tmp_path_factory: pytest.TempPathFactory) -> CpuEngine:
    folder = make_tiny_checkpoint(
        tmp_path_factory.mktemp("online"), vocab_size=VOCAB_SIZE, max_position_embeddings=256
    )
    return CpuEngine(folder, threads=1, kv_memory_bytes=1 << 24)


def text_of(start: int) -> list[int]:
    return [CYCLE[(start + place) % len(CYCLE)] for place in range(LENGTH)]


def own_text(engine: CpuEngine, start: int) -> list[int]:
    """What the drafter itself would write."""
    text, fed = text_of(start)[:4], 0
    blocks = range(-(-LENGTH // engine.block_size))
    while len(text) < LENGTH:
        logits_TV = engine.step([Slice(blocks, fed, text[fed:], 1)])
        fed = len(text)
        text.append(int(logits_TV[0].argmax()))
    return text


class Run:
    """A drafter beside texts that are known."""

    def __init__(self, engine: CpuEngine, *, learns: bool = True) -> None:
        self.proposer = ModelProposer(engine, prefix_cache=False, learns=learns)
        self.desk = DraftingDesk(self.proposer, max_sequences=4)
        self.session = self.desk.open_session()

    def draft(self, text: list[int], *, tenant: str = "", rule: str = "coupled") -> DraftTree:
        """A chain of three tokens after the first four of a text."""
        spec = SequenceSpec(SamplingParams(), seed=4, prompt_length=4, rule=rule)
        self.session.open(9, spec, text[:4], tenant=tenant)
        self.session.grant(9, Grant(7))
        while self.desk.has_work:
            self.desk.run_pass()
        return self.session.trees[9]

    def follow(self, text: list[int], *, tenant: str = "", idles: bool = True) -> float:
        """Draft along a text, and learn. Returns the share of its tokens that were drafted."""
        spec = SequenceSpec(SamplingParams(temperature=0.0), seed=4, prompt_length=4)
        assert self.session.open(1, spec, text[:4], tenant=tenant) is None
        position, right = 4, 0
        while position < len(text):
            self.session.grant(1, Grant(min(position + 3, len(text))))
            while self.desk.has_work:
                self.desk.run_pass()
            drafted = self.session.trees[1].tokens[1:]
            hits = 0
            while hits < len(drafted) and drafted[hits] == text[position + hits]:
                hits += 1
            committed = text[position : position + hits + 1]
            self.session.outcome(1, position, committed)
            position, right = position + len(committed), right + hits
            while idles and self.desk.learn():
                pass
        self.desk.check_integrity()
        self.session.close(1)
        return right / LENGTH


def test_what_a_tenants_texts_repeat_is_drafted_for_it_alone(wide_engine: CpuEngine) -> None:
    run, plain = Run(wide_engine), Run(wide_engine, learns=False)
    before = plain.follow(text_of(0), tenant="a")
    run.follow(text_of(0), tenant="a")
    run.follow(text_of(1), tenant="a")
    after = run.follow(text_of(2), tenant="a", idles=False)
    assert before < 0.1
    assert after > 0.3
    for text in (text_of(3), text_of(5)):
        expected = plain.draft(text, tenant="b").tokens
        assert run.draft(text, tenant="b").tokens == expected
        assert run.draft(text, tenant="a").tokens != expected


def test_it_goes_back_where_what_it_learned_does_harm(wide_engine: CpuEngine) -> None:
    """The drafter as it was loaded is always right about the second text."""
    run, plain = Run(wide_engine), Run(wide_engine, learns=False)
    for start in (0, 1):
        run.follow(text_of(start))
    others = [own_text(wide_engine, start) for start in range(4)]
    assert run.follow(others[0]) < plain.follow(others[0])
    for text in others[1:3]:
        run.follow(text)
    assert run.follow(others[3]) == plain.follow(others[3])


def test_the_distribution_that_is_sent_is_the_one_drawn_from(wide_engine: CpuEngine) -> None:
    run, plain = Run(wide_engine), Run(wide_engine, learns=False)
    for start in (0, 1):
        run.follow(text_of(start))
    text = text_of(2)
    learned, loaded = (one.draft(text, rule="rejection") for one in (run, plain))
    assert learned.distributions[ROOT].exact() != loaded.distributions[ROOT].exact()
    for node in range(learned.end):
        prefix = learned.prefix(node)
        own = of_node(learned.spec, hash_prefix(prefix))
        drawn = draw_chain_token(learned.distributions[node], own, len(prefix))
        assert learned.tokens[node + 1] == drawn


def test_logits_that_are_not_finite_teach_nothing() -> None:
    learning = OnlineLearning()
    spec = SequenceSpec(SamplingParams(), seed=1, prompt_length=1)
    tree = DraftTree(spec, [1], max_position=100)
    generator = torch.Generator().manual_seed(2)
    usual_TV = torch.randn(1, 300, generator=generator)
    for number in range(400):
        logits_TV = usual_TV + 0.3 * torch.randn(1, 300, generator=generator)
        if number % 3 == 0:
            logits_TV[0, 5] = (torch.nan, torch.inf, -torch.inf)[number // 3 % 3]
        learning.corrected(logits_TV, [(tree, ROOT)])
        learning.committed(tree, Kept((40,), (), (), agreed=False))
        while learning.learn():
            pass
    corrected_TV = learning.corrected(usual_TV, [(tree, ROOT)])
    assert bool(corrected_TV.isfinite().all())
    assert int(corrected_TV.argmax()) == 40


def test_tenants_tokens_and_rows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MOST_TENANTS": 2, "MOST_TOKENS": 64, "MOST_ROWS": 40}.items():
        monkeypatch.setattr(online, name, value)
    monkeypatch.setattr(online, "KNOWN", 1)
    monkeypatch.setattr(online, "BATCH", 8)
    learning = OnlineLearning()
    spec = SequenceSpec(SamplingParams(), seed=1, prompt_length=1)
    generator = torch.Generator().manual_seed(2)
    trees = [DraftTree(spec, [1], max_position=100, tenant=name) for name in "abc"]
    for number in range(300):
        tree = trees[number % 3 if number > 200 else 0]
        learning.corrected(torch.randn(5, 300, generator=generator), [(tree, n) for n in range(5)])
        learning.committed(tree, Kept((number,), (), (), agreed=False))
        while learning.learn():
            pass
    assert len(learning._learners) == 2
    assert all(len(one._ids_C) <= 64 for one in learning._learners.values())
    assert sum(row.logits_V is not None for row in learning._waiting) <= 40

"""Random orders of messages and passes: the desk against a mirror of what a driver would know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ProtocolError
from paceline.prefix_hash import hash_prefix
from paceline.sampling import SamplingParams, SequenceSpec
from tests.workers.drafting.mirror import BLOCK_BYTES, MAX_LEN, VOCAB_SIZE, FreshDrafter
from workers.drafting.desk import DraftingDesk, DraftingSession
from workers.drafting.kind import Proposer
from workers.drafting.kinds.model.proposer import ModelProposer
from workers.drafting.kinds.ngram import NgramProposer
from workers.drafting.proposal import Proposal
from workers.drafting.tree import Grant
from workers.engine.cpu.engine import CpuEngine
from workers.verification.choice import choose_token

Draft = Callable[[SequenceSpec, Sequence[int]], int | None]
"""The token that must follow committed tokens and run-ahead; None: no token may."""

SPECS = (
    SequenceSpec(SamplingParams(temperature=0.0), seed=0, prompt_length=1),
    SequenceSpec(
        SamplingParams(
            temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.5, min_tokens=2
        ),
        seed=11,
        prompt_length=1,
        end_token_ids=tuple(range(0, VOCAB_SIZE, 5)),
    ),
)


class _Mirror:
    """One sequence as a driver knows it from messages alone."""

    def __init__(self, spec: SequenceSpec, token_ids: Sequence[int]) -> None:
        self.spec = spec
        self.path = list(token_ids)
        self.num_committed = len(token_ids)
        self.until = 0
        self.last_at: int | None = None

    def commit(self, token_ids: Sequence[int]) -> None:
        end = self.num_committed + len(token_ids)
        if self.path[self.num_committed : end] != list(token_ids):
            self.path[self.num_committed :] = token_ids
        self.last_at = None
        self.num_committed = end

    def take(self, proposal: Proposal, max_position: int) -> None:
        assert proposal.base_length == len(self.path)
        assert proposal.base_hash == hash_prefix(self.path)
        assert self.last_at != len(self.path), "more came after `last`"
        self.path.extend(proposal.token_ids)
        if proposal.token_ids:
            assert len(self.path) <= min(self.until, max_position), "beyond the grant"
        for position in range(proposal.base_length, len(self.path)):
            follows_output = position > self.spec.prompt_length
            ended = self.path[position - 1] in self.spec.end_token_ids
            assert not (follows_output and ended), "drafted beyond an end token"
        if proposal.last:
            self.last_at = len(self.path)
        else:
            assert proposal.token_ids


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> CpuEngine:
    # Three blocks and two needed for the longest sequence: the pool is often full.
    return CpuEngine(checkpoint, threads=1, kv_memory_bytes=3 * BLOCK_BYTES)


@pytest.fixture(scope="module")
def fresh_draft(fresh: FreshDrafter) -> Draft:
    """The proposals of a drafter without history."""

    def draft(spec: SequenceSpec, prefix: Sequence[int]) -> int:
        return choose_token(fresh.logits(tuple(prefix)), spec, prefix)

    return draft


def brute_force_lookup(committed: Sequence[int], suffix: Sequence[int]) -> int | None:
    """The position after the newest occurrence of the longest suffix, by looking everywhere."""
    for length in range(min(4, len(suffix)), 0, -1):
        for position in range(len(committed) - 1, length - 1, -1):
            if list(committed[position - length : position]) == list(suffix[-length:]):
                return position
    return None


ACTIONS = {"pass": 9, "outcome": 5, "grant": 4, "open": 2, "close": 1, "end": 1}


def run_schedule(proposer: Proposer, random: Random, check: Callable[..., None]) -> None:
    """Run two streams with up to two sequences each, and any order of messages and passes."""
    desk = DraftingDesk(proposer, max_sequences=3)
    sessions = [desk.open_session(), desk.open_session()]
    mirrors: dict[tuple[DraftingSession, int], _Mirror] = {}
    num_tokens = VOCAB_SIZE if desk.info.vocab_size else 3
    for _ in range(60):
        index = random.randrange(2)
        session, sequence_id = sessions[index], random.randrange(2)
        key = (session, sequence_id)
        mirror = mirrors.get(key)
        (action,) = random.choices(list(ACTIONS), list(ACTIONS.values()))
        if action == "open" or (action == "grant" and mirror is None):
            length = random.choice([1, 2, 9, 33, 126, 128, MAX_LEN - 3, MAX_LEN])
            prompt = [random.randrange(num_tokens) for _ in range(length)]
            spec = random.choice(SPECS)
            mirrors.pop(key, None)
            if session.open(sequence_id, spec, prompt) is None:
                mirrors[key] = _Mirror(spec, prompt)
        elif action == "outcome":
            committed = _outcome(random, mirror, num_tokens)
            session.outcome(sequence_id, mirror.num_committed if mirror else 0, committed)
            if mirror is not None:
                mirror.commit(committed)
        elif action == "grant":
            until = random.randrange(12) + (mirror.num_committed if mirror else 0)
            session.grant(sequence_id, Grant(until))
            if mirror is not None:
                mirror.until = until
        elif action == "close":
            session.close(sequence_id)
            mirrors.pop(key, None)
        elif action == "end":
            desk.close_session(session)
            sessions[index] = desk.open_session()
            mirrors = {held: kept for held, kept in mirrors.items() if held[0] is not session}
        elif desk.has_work:
            _run_pass(desk, mirrors, check)
            desk.pass_took(random.uniform(1, 9))
        _forget_taken_back(desk, mirrors)
        desk.check_integrity()
        assert set(mirrors) == {
            (held, sequence_id) for held in sessions for sequence_id in held.trees
        }
    _drain(desk, mirrors, check)
    for session in sessions:
        desk.close_session(session)
    desk.check_integrity()
    assert not desk.has_work


def _forget_taken_back(
    desk: DraftingDesk, mirrors: dict[tuple[DraftingSession, int], _Mirror]
) -> None:
    """Sequences of one stream are closed for the sake of the other one."""
    for session, declined in desk.taken_back():
        assert declined.reason
        assert not declined.for_good
        del mirrors[session, declined.sequence_id]


def _outcome(random: Random, mirror: _Mirror | None, num_tokens: int) -> list[int]:
    """An outcome of some run-ahead tokens, then perhaps another token."""
    ahead = mirror.path[mirror.num_committed :] if mirror else []
    agreeing = ahead[: random.randint(0, len(ahead))]
    others = random.choice([0, 1, 1, 2]) if agreeing else 1
    return agreeing + [random.randrange(num_tokens) for _ in range(others)]


def _run_pass(
    desk: DraftingDesk,
    mirrors: dict[tuple[DraftingSession, int], _Mirror],
    check: Callable[..., None],
) -> None:
    done = desk.run_pass()
    _forget_taken_back(desk, mirrors)
    for news in done:
        for proposal in news.proposals:
            mirror = mirrors[news.session, proposal.sequence_id]
            check(mirror, proposal)
            mirror.take(proposal, desk.info.max_position)
        for declined in news.declined:
            assert declined.reason
            del mirrors[news.session, declined.sequence_id]


def _drain(
    desk: DraftingDesk,
    mirrors: dict[tuple[DraftingSession, int], _Mirror],
    check: Callable[..., None],
) -> None:
    """Run passes without further messages. They must end, with every grant used or answered."""
    for _ in range(100):
        if desk.has_work:
            _run_pass(desk, mirrors, check)
    assert not desk.has_work, "passes go on for ever"
    for mirror in mirrors.values():
        assert len(mirror.path) >= mirror.until or mirror.last_at == len(mirror.path)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_model_drafts_are_those_of_a_fresh_drafter(
    engine: CpuEngine, fresh_draft: Draft, seed: int
) -> None:
    def check(mirror: _Mirror, proposal: Proposal) -> None:
        for token_id in proposal.token_ids:
            assert token_id == fresh_draft(mirror.spec, mirror.path)

    run_schedule(ModelProposer(engine), Random(seed), check)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_ngram_drafts_are_those_of_a_search_through_everything(seed: int) -> None:
    def check(mirror: _Mirror, proposal: Proposal) -> None:
        committed = mirror.path[: mirror.num_committed]
        source = brute_force_lookup(committed, mirror.path)
        if source is None:
            assert not proposal.token_ids
            return
        text = list(mirror.path)
        for token_id in proposal.token_ids:
            text.append(text[source])
            source += 1
            assert token_id == text[-1]

    run_schedule(NgramProposer(), Random(seed), check)


def test_a_wrong_outcome_position_is_named() -> None:
    session = DraftingDesk(NgramProposer(), max_sequences=1).open_session()
    assert session.open(1, SPECS[0], [1, 2, 3]) is None
    with pytest.raises(ProtocolError, match=r"outcome\.position: expected 3"):
        session.outcome(1, 4, [5])


def test_a_desk_takes_no_more_sequences_than_it_may() -> None:
    desk = DraftingDesk(NgramProposer(), max_sequences=2)
    first, second = desk.open_session(), desk.open_session()
    assert first.open(1, SPECS[0], [1]) is None
    assert second.open(1, SPECS[0], [1]) is None
    declined = second.open(2, SPECS[0], [1])
    assert declined is not None
    assert "2 sequences are open" in declined.reason
    assert not declined.for_good
    desk.close_session(first)
    assert second.open(2, SPECS[0], [1]) is None


def test_ngram_prefers_the_longest_suffix_and_then_the_newest() -> None:
    desk = DraftingDesk(NgramProposer(), max_sequences=1)
    session = desk.open_session()
    #                       1 2 3 -> 7          2 3 -> 8   9 3 -> 6
    session.open(1, SPECS[0], [1, 2, 3, 7, 5, 5, 2, 3, 8, 9, 3, 6, 1, 2, 3])
    session.grant(1, Grant(17))
    (news,) = desk.run_pass()
    assert news.proposals[0].token_ids == (7, 5)
    assert not news.proposals[0].last
    session.outcome(1, 15, [9, 3])
    session.grant(1, Grant(18))
    (news,) = desk.run_pass()
    assert news.proposals[0].token_ids == (6,)


def test_ngram_says_so_when_it_has_nothing_and_says_it_once() -> None:
    desk = DraftingDesk(NgramProposer(), max_sequences=1)
    session = desk.open_session()
    session.open(1, SPECS[0], [1, 2, 3])
    session.grant(1, Grant(8))
    (news,) = desk.run_pass()
    assert (news.proposals[0].token_ids, news.proposals[0].last) == ((), True)
    session.grant(1, Grant(9))
    assert not desk.has_work
    session.outcome(1, 3, [2])
    (news,) = desk.run_pass()
    assert news.proposals[0].token_ids == (3, 2, 3, 2, 3)


def test_a_long_prefill_is_cut_between_the_drafts_of_others(engine: CpuEngine) -> None:
    desk = DraftingDesk(ModelProposer(engine), max_sequences=2)
    session = desk.open_session()
    session.open(1, SPECS[0], [5])
    session.open(2, SPECS[0], list(range(100)))
    session.grant(1, Grant(9))
    session.grant(2, Grant(104))
    drafted = []
    while desk.has_work:
        (news,) = desk.run_pass()
        drafted.append({proposal.sequence_id for proposal in news.proposals})
    assert drafted[0] == drafted[1] == {1}
    assert {2} <= drafted[3]
    desk.close_session(session)


def test_the_draft_that_reaches_an_end_token_says_that_it_is_the_last() -> None:
    spec = SequenceSpec(SamplingParams(), seed=0, prompt_length=6, end_token_ids=(9,))
    session = (desk := DraftingDesk(NgramProposer(), max_sequences=1)).open_session()
    session.open(1, spec, [4, 5, 9, 6, 4, 5])
    session.grant(1, Grant(12))
    (news,) = desk.run_pass()
    assert (news.proposals[0].token_ids, news.proposals[0].last) == ((9,), True)
    assert not desk.has_work

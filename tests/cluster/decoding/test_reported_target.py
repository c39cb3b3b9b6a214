"""Drafting for a target that steps elsewhere: scripts, and a fuzzed engine that plans by itself."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from cluster.decoding.events import (
    DraftDeclined,
    DrafterJoined,
    DrafterLost,
    MalformedProposal,
    Proposal,
    Proposed,
)
from cluster.decoding.instructions import (
    CloseDraft,
    Instruction,
    OpenDraft,
    SendGrant,
    SendOutcome,
    Suspect,
)
from cluster.decoding.policy import Wait
from cluster.decoding.reported_target import ReportedOptions, ReportedTarget
from paceline.prefix_hash import hash_prefix
from tests.cluster.decoding.pretended_drafter import PretendedDrafter
from tests.cluster.decoding.true_text import VOCAB_SIZE, true_token

PROMPT = (7, 8, 9)
LENGTH = 60


def _target(policy: str = "chain", window: int = 4, **options: float) -> ReportedTarget:
    target = ReportedTarget(ReportedOptions(VOCAB_SIZE, 1000, policy, window, **options))  # type: ignore[arg-type]
    assert target.handle(DrafterJoined(0.0, "d", 1000)) == []
    return target


def _chain(path: tuple[int, ...], *token_ids: int) -> Proposed:
    return Proposed(0.5, "d", (Proposal(1, len(path), hash_prefix(path), token_ids),))


def _verifying() -> ReportedTarget:
    """A target whose step verifies the first 4 of 6 candidates that arrived."""
    target = _target()
    target.open(1.0, PROMPT)
    target.handle(_chain(PROMPT, 1, 2, 3, 4, 5, 6))
    target.step_done(2.0, {}, None)
    assert target.windows(2.0, [1]) == {1: (1, 2, 3, 4)}
    target.messages()
    return target


def test_a_new_text_is_opened_at_the_drafter_which_gets_a_grant() -> None:
    target = _target()
    assert target.open(1.0, PROMPT) == 1
    opened, grant = target.messages()
    assert isinstance(opened, OpenDraft)
    assert opened.token_ids == PROMPT
    assert opened.spec.sampling.greedy
    assert opened.vocab_size == VOCAB_SIZE
    assert isinstance(grant, SendGrant)
    assert grant.grant.until_position == len(PROMPT) + 2 * 4 + 1


def test_candidates_that_arrived_are_the_next_window_and_outcomes_are_told() -> None:
    target = _verifying()
    target.step_done(3.0, {1: (1, 2, 40)}, 0.9)  # The third candidate was refused.
    assert target.windows(3.0, [1]) == {1: ()}
    outcome, *_ = target.messages()
    assert isinstance(outcome, SendOutcome)
    assert (outcome.position, outcome.token_ids) == (3, (1, 2, 40))
    counts = target.totals.counts
    assert (counts.drafted, counts.accepted, counts.committed) == (4, 2, 3)
    target.check_integrity()


def test_run_ahead_beyond_the_verdict_is_the_window_after_it() -> None:
    target = _verifying()
    target.step_done(3.0, {1: (1, 2, 3, 4, 5)}, 0.9)
    assert target.windows(3.0, [1]) == {1: (6,)}


def test_the_branch_that_came_true_is_the_next_window() -> None:
    target = _target("fanout")
    target.open(1.0, PROMPT)
    target.handle(_chain(PROMPT, 1, 2))
    target.handle(_chain((*PROMPT, 1), 30, 31, 32))  # Another outcome, foreseen.
    target.step_done(2.0, {}, None)
    assert target.windows(2.0, [1]) == {1: (1, 2)}  # A step verifies a chain.
    target.messages()
    target.step_done(3.0, {1: (1, 30)}, 0.9)
    assert target.windows(3.0, [1]) == {1: (31, 32)}
    assert target.totals.counts.branch_hits == 0  # Counted with the report's second phase.
    target.messages()
    assert target.totals.counts.branch_hits == 1


def test_lockstep_waits_for_its_window_and_gives_up_in_time() -> None:
    target = _target("lockstep", wait_seconds=0.5)
    target.open(1.0, PROMPT)
    target.messages()
    target.step_done(2.0, {1: (5,)}, None)
    waits = target.windows(2.0, [1])
    assert isinstance(waits, Wait)
    assert waits.until == pytest.approx(2.5)
    target.messages()
    target.handle(_chain((*PROMPT, 5), 1, 2))
    assert isinstance(target.windows(2.1, [1]), Wait)
    assert target.windows(2.5, [1], may_wait=False) == {1: (1, 2)}


def test_a_report_that_was_missed_is_made_good_by_the_next_one() -> None:
    target = _verifying()
    target.step_done(4.0, {1: (1, 2, 3, 9, 9, 9, 9)}, None)  # Of two steps.
    assert target.windows(4.0, [1]) == {1: ()}
    target.messages()
    target.check_integrity()


def test_no_window_goes_to_the_last_position() -> None:
    target = ReportedTarget(ReportedOptions(VOCAB_SIZE, len(PROMPT) + 3, window=8))
    target.handle(DrafterJoined(0.0, "d", 1000))
    target.open(1.0, PROMPT)
    grant = target.messages()[1]
    assert isinstance(grant, SendGrant)
    assert grant.grant.until_position == len(PROMPT) + 2
    target.handle(_chain(PROMPT, 1, 2, 3, 4))
    target.step_done(2.0, {}, None)
    assert target.windows(2.0, [1]) == {1: (1, 2)}


def test_a_drafter_that_breaks_the_contract_is_suspect() -> None:
    target = _target()
    target.open(1.0, PROMPT)
    told: list[Instruction] = []
    for _ in range(3):
        told += target.handle(MalformedProposal(1.0, "d"))
    assert any(isinstance(one, Suspect) for one in told)
    target.step_done(2.0, {1: (5,)}, 0.1)
    assert target.windows(2.0, [1]) == {1: ()}


@dataclass
class _Engine:
    """An engine that plans its own steps: it takes some rows, cuts candidates, forgets reports."""

    random: random.Random
    target: ReportedTarget
    drafters: dict[str, PretendedDrafter] = field(default_factory=dict)
    texts: dict[int, list[int]] = field(default_factory=dict)
    untold: dict[int, list[int]] = field(default_factory=dict)
    now: float = 0.0

    def tell(self, instructions: list[Instruction]) -> None:
        for one in instructions:
            assert isinstance(one, (OpenDraft, SendOutcome, SendGrant, CloseDraft))
            if one.drafter in self.drafters:
                self.drafters[one.drafter].tell(one)

    def begin(self) -> None:
        prompt = [self.random.randrange(1, VOCAB_SIZE) for _ in range(self.random.randrange(1, 9))]
        sequence_id = self.target.open(self.now, prompt)
        self.texts[sequence_id] = prompt
        self.tell(self.target.messages())

    def end(self, sequence_id: int) -> None:
        self.target.close(self.now, sequence_id)
        del self.texts[sequence_id]
        self.untold.pop(sequence_id, None)

    def step(self) -> int:
        """A step of some rows. Returns how many candidates were right."""
        rows = [one for one in self.texts if self.random.random() < 0.8]
        if self.random.random() < 0.1:  # A report is missed.
            for row in rows:
                self._verify(row, ())
            return 0
        committed, self.untold = {one: tuple(new) for one, new in self.untold.items()}, {}
        self.target.step_done(self.now, committed, 0.01 if self.random.random() < 0.7 else None)
        windows = self.target.windows(self.now, rows, may_wait=False)
        assert not isinstance(windows, Wait)
        assert list(windows) == rows
        if self.random.random() < 0.5:
            self.tell(self.target.messages())
        right = 0
        for row, window in windows.items():
            assert len(window) <= 4
            kept = window[: self.random.randrange(5)]  # A grammar may cut it.
            right += self._verify(row, kept)
        return right

    def _verify(self, row: int, window: tuple[int, ...]) -> int:
        text = self.texts[row]
        accepted = 0
        for candidate in window:
            if candidate != true_token(text, 0):
                break
            text.append(candidate)
            accepted += 1
        text.append(true_token(text, 0))
        self.untold.setdefault(row, []).extend(text[-accepted - 1 :])
        return accepted


@pytest.mark.parametrize("policy", ["chain", "fanout", "lockstep", "pearl", "spread", "auto"])
def test_whatever_an_engine_does_drafters_know_its_text(policy: str) -> None:
    """The drafters are told every token, in order: PretendedDrafter asserts the positions."""
    right = 0
    for seed in range(12):
        source = random.Random(f"{policy}-{seed}")
        engine = _Engine(source, ReportedTarget(ReportedOptions(VOCAB_SIZE, 1000, policy, 4)))
        for number in range(150):
            engine.now += source.random() * 0.05
            roll = source.random()
            if roll < 0.1 and len(engine.texts) < 5:
                engine.begin()
            elif roll < 0.13 and engine.texts:
                engine.end(source.choice(list(engine.texts)))
                engine.tell(engine.target.messages())
            elif roll < 0.16 or not engine.drafters:
                _change_drafters(engine, f"d{number}", source)
            elif roll < 0.6 and engine.drafters:
                _draft(engine, source)
            else:
                right += engine.step()
                engine.tell(engine.target.messages())
            engine.target.check_integrity()
        for sequence_id in list(engine.texts):
            engine.end(sequence_id)
        engine.tell(engine.target.messages())
        assert not engine.target.num_sequences
        assert not any(one.sequences for one in engine.drafters.values()), "left at a drafter"
    assert right > 50, "candidates were hardly ever right, so that nothing was shown"


def _change_drafters(engine: _Engine, name: str, source: random.Random) -> None:
    if engine.drafters and source.random() < 0.5:
        lost = source.choice(list(engine.drafters))
        del engine.drafters[lost]
        engine.tell(engine.target.handle(DrafterLost(engine.now, lost)))
        return

    def guess(path: list[int], seed: int) -> int:
        return true_token(path, 0) if source.random() < 0.9 else source.randrange(VOCAB_SIZE)

    engine.drafters[name] = PretendedDrafter(guess)
    engine.tell(engine.target.handle(DrafterJoined(engine.now, name, 1000)))


def _draft(engine: _Engine, source: random.Random) -> None:
    name = source.choice(list(engine.drafters))
    drafter = engine.drafters[name]
    if source.random() < 0.03 and drafter.sequences:
        declined = source.choice(list(drafter.sequences))
        del drafter.sequences[declined]
        engine.tell(engine.target.handle(DraftDeclined(engine.now, name, declined)))
        return
    made = drafter.run_pass()
    if made:
        engine.tell(engine.target.handle(Proposed(engine.now, name, made, pass_seconds=0.002)))


def _plays(
    policy: str, *, batch: int, acceptance: float, steps: int = 120
) -> tuple[float, float, list[int]]:
    """Tokens a second and of plain decoding, in virtual time, and the windows of the last steps.

    A step takes 20 ms and 3 ms for each token; a pass takes 10 ms whatever the batch.
    """
    source = random.Random(policy)
    target = _target(policy, window=8)
    drafter = PretendedDrafter(
        lambda path, seed: (
            true_token(path, 0) if source.random() < acceptance else source.randrange(VOCAB_SIZE)
        )
    )
    texts = {target.open(0.0, [number + 1]): [number + 1] for number in range(batch)}
    now, last = 0.0, 0.0
    committed: dict[int, tuple[int, ...]] = {}
    sizes: list[int] = []

    def tell(instructions: list[Instruction]) -> None:
        for one in instructions:
            assert isinstance(one, (OpenDraft, SendOutcome, SendGrant, CloseDraft))
            drafter.tell(one)

    tell(target.messages())
    tokens, next_pass = 0, 0.01
    for _ in range(steps):
        target.step_done(now, committed, now - last if committed else None)
        windows = target.windows(now, list(texts), may_wait=False)
        assert not isinstance(windows, Wait)
        tell(target.messages())
        last = now
        now += 0.02 + 0.003 * sum(1 + len(one) for one in windows.values())
        while next_pass < now:
            made = drafter.run_pass()
            if made:
                tell(target.handle(Proposed(next_pass, "d", made, pass_seconds=0.01)))
            next_pass += 0.01
        committed = {}
        for sequence_id, window in windows.items():
            text, before = texts[sequence_id], len(texts[sequence_id])
            for candidate in window:
                if candidate != true_token(text, 0):
                    break
                text.append(candidate)
            text.append(true_token(text, 0))
            committed[sequence_id] = tuple(text[before:])
            tokens += len(text) - before
        sizes.append(sum(map(len, windows.values())))
    return tokens / now, batch / (0.02 + 0.003 * batch), sizes[-50:]


def test_auto_drafts_where_it_pays() -> None:
    speed, plain, sizes = _plays("auto", batch=1, acceptance=0.95)
    assert speed > 1.5 * plain
    assert sum(sizes) > 50


def test_auto_ends_at_no_window_where_drafting_does_not_pay() -> None:
    """Negative control: `chain` loses much in the same place."""
    speed, plain, sizes = _plays("auto", batch=16, acceptance=0.2)
    assert speed > 0.95 * plain
    assert sum(size == 0 for size in sizes) > 30
    chain, _, _ = _plays("chain", batch=16, acceptance=0.2)
    assert chain < 0.8 * plain

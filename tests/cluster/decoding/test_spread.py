"""Policy spread on short scripts: which drafter drafts what, and when work moves."""

from __future__ import annotations

import pytest

from cluster.decoding.events import (
    Admitted,
    DrafterJoined,
    DrafterLost,
    Event,
    Proposal,
    Proposed,
    SequenceVerdict,
    StepDone,
    TargetJoined,
)
from cluster.decoding.instructions import CloseDraft, Instruction, OpenDraft, RunStep, SendGrant
from cluster.decoding.scheduler import Scheduler
from cluster.driver.fitting import check_layout
from paceline.errors import InvalidRequestError
from paceline.prefix_hash import hash_prefix
from tests.cluster.decoding.scripts import PROMPT, the_step
from tests.cluster.decoding.true_text import request
from workers.drafting.tree import Grant


class Script:
    """A scheduler whose target accepts nothing."""

    def __init__(self, drafters: str, *, sequences: int = 1) -> None:
        self.scheduler = Scheduler()
        self.now = 0.0
        self.step: RunStep | None = None
        self.open: dict[str, set[int]] = {name: set() for name in drafters}
        self.grants: dict[tuple[str, int], Grant] = {}
        self.send(TargetJoined(0, 50, 1000, 4, 64))
        for name in drafters:
            self.send(DrafterJoined(0, name, 1000))
        for number in range(1, sequences + 1):
            asked = request(number, PROMPT, policy="spread", window=2, max_tokens=200)
            self.send(Admitted(0, asked))
        if sequences > 1:
            self.answer()  # the first one's prefill: the others are let in

    def send(self, event: Event) -> list[Instruction]:
        out = self.scheduler.handle(event)
        for one in out:
            match one:
                case RunStep():
                    self.step = one
                case OpenDraft(drafter, sequence_id):
                    assert sequence_id not in self.open[drafter]
                    self.open[drafter].add(sequence_id)
                case CloseDraft(drafter, sequence_id):
                    self.open[drafter].remove(sequence_id)
                case SendGrant(drafter, sequence_id, grant):
                    assert sequence_id in self.open[drafter]
                    self.grants[drafter, sequence_id] = grant
        self.scheduler.check_integrity()
        return out

    def answer(self, seconds: float = 0.05, token_id: int = 9) -> list[Instruction]:
        assert self.step is not None
        self.now += seconds
        verdicts = tuple(
            SequenceVerdict(part.sequence_id, 0, token_id)
            for part in self.step.slices
            if part.verdict
        )
        return self.send(StepDone(self.now, self.step.step, verdicts, step_seconds=seconds))

    def say(self, drafter: str, *token_ids: int, pass_ms: float = 2.0) -> None:
        """The drafter sends a proposal for sequence 1 after its prompt."""
        one = Proposal(1, len(PROMPT), hash_prefix(PROMPT), token_ids)
        self.send(Proposed(self.now, drafter, (one,), pass_seconds=pass_ms / 1000))

    def draft_on(self, steps: int, **pass_ms: float) -> None:
        """Answer `steps` steps. In each, every given drafter drafts once, in `pass_ms`."""
        for _ in range(steps):
            for drafter, ms in pass_ms.items():
                self.say(drafter, 5, pass_ms=ms)
            self.answer()


def shares(script: Script, sequence_id: int) -> dict[str, tuple[int, int]]:
    return {
        name: (grant.share, grant.shares)
        for (name, of), grant in script.grants.items()
        if of == sequence_id and of in script.open[name]
    }


def test_sequences_are_balanced_and_spare_drafters_share_the_branches_of_one() -> None:
    assert Script("ab", sequences=4).open == {"a": {1, 3}, "b": {2, 4}}
    script = Script("abc")
    assert shares(script, 1) == {"a": (0, 3), "b": (1, 3), "c": (2, 3)}
    one = script.grants["a", 1]
    assert one.fan_out == 2 * 5, "twice as many branches as one drafter would have"
    # Another request needs a drafter of its own, so each has one and the third goes to the first.
    script.send(Admitted(script.now, request(2, PROMPT, policy="spread")))
    script.answer()
    assert sum(len(open_) for open_ in script.open.values()) == 3
    assert len(shares(script, 1)) == 2
    assert len(shares(script, 2)) == 1


def test_a_helper_takes_the_place_of_a_lost_drafter_with_what_it_has() -> None:
    script = Script("ab")
    out = script.send(DrafterLost(script.now, "a"))
    assert not any(isinstance(one, OpenDraft) for one in out), "b knows the sequence"
    script.answer()
    assert shares(script, 1) | {"a": (0, 0)} == {"a": (0, 0), "b": (0, 0)}


def test_what_a_helper_has_on_the_way_when_it_takes_a_place_is_taken() -> None:
    """A drafter sends nothing twice, so later drafts would hang on what was dropped."""
    script = Script("ab")
    out = script.send(DrafterLost(script.now, "a"))
    assert [one.drafter for one in out if isinstance(one, SendGrant)] == ["b"], "at once"
    script = Script("ab")
    before = script.grants["b", 1]
    script.send(DrafterLost(script.now, "a"))
    assert script.grants["b", 1].nodes < before.nodes, "alone it has fewer branches"
    prefix = (*PROMPT, *range(10, 10 + before.until_position - len(PROMPT)))
    script.say("b", *prefix[len(PROMPT) :])
    for other in range(15, 15 + before.nodes - len(prefix) + len(PROMPT)):
        script.say("b", other)
    (sequence,) = script.scheduler._state.running
    assert sequence.tree.num_candidates == before.nodes, "all that it had leave for"
    assert script.scheduler.totals.dropped_proposals == 0


def test_the_chain_of_the_sequences_own_drafter_is_verified_whoever_comes_first() -> None:
    script = Script("ab")
    script.say("b", 20, 21)
    script.say("a", 10, 11)
    script.answer(token_id=30)
    script.scheduler.check_integrity()
    script = Script("ab")
    prefill = script.step
    assert prefill is not None
    script.say("b", 9, 20, 21)
    script.say("a", 9, 10, 11)
    assert the_step(script.answer()).slices[0].token_ids == (9, 10, 11)
    # The helper's is held as a branch.
    assert the_step(script.answer(token_id=20)).slices[0].token_ids == (20, 21)


def test_work_leaves_a_silent_drafter() -> None:
    script = Script("ab", sequences=2)
    assert script.open == {"a": {1}, "b": {2}}
    for _ in range(20):
        script.answer()
        script.say("b")
    assert script.open == {"a": set(), "b": {1, 2}}


def test_work_leaves_a_slow_drafter_and_does_not_come_back() -> None:
    script = Script("ab", sequences=2)
    script.draft_on(40, a=20.0, b=2.0)
    assert script.open == {"a": set(), "b": {1, 2}}


def test_a_much_faster_helper_leads_and_goes_on_leading() -> None:
    script = Script("abc")
    assert shares(script, 1) == {"a": (0, 3), "b": (1, 3), "c": (2, 3)}
    for number in range(40):  # a is ten times slower from some time on
        script.say("a", 5, pass_ms=2.0 if number < 10 else 20.0)
        script.say("b", 5, pass_ms=2.5)
        script.say("c", 5, pass_ms=2.5)
        script.answer()
    assert shares(script, 1) == {"b": (0, 3), "a": (1, 3), "c": (2, 3)}
    (sequence,) = script.scheduler._state.running
    committed = sequence.tree.token_ids[len(PROMPT) :]
    script.say("a", *committed, 9, 20, 21)
    script.say("b", *committed, 9, 10, 11)
    assert the_step(script.answer()).slices[0].token_ids == (9, 10, 11), "its chain is verified"


def test_a_drafter_that_was_slow_is_tried_again_when_that_is_long_ago() -> None:
    script = Script("ab", sequences=4)
    script.draft_on(40, a=20.0, b=2.0)
    assert script.open == {"a": set(), "b": {1, 2, 3, 4}}
    for _ in range(60):
        script.say("b", 5, pass_ms=2.0)
        script.answer(0.1)
    assert {len(open_) for open_ in script.open.values()} == {2}
    script.draft_on(10, a=20.0, b=2.0)
    assert script.open["a"] == set(), "it is as slow as before"


def test_work_leaves_a_crowd() -> None:
    script = Script("a", sequences=3)
    script.open["b"] = set()
    script.send(DrafterJoined(script.now, "b", 1000))
    script.say("a", 5)
    script.answer()
    assert {len(open_) for open_ in script.open.values()} == {1, 2}


def test_one_drafter_is_refused_with_the_reason() -> None:
    with pytest.raises(InvalidRequestError, match="at least 2 drafters"):
        check_layout("spread", 1, 1)
    check_layout("spread", 2, 1)
    check_layout("fanout", 1, 1)

"""How long a drafter is trusted: refusals, silence, and how much it may send. Only by events."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from cluster.decoding.drafters import (
    FIRST_PAUSE,
    FIRST_REST,
    LONGEST_PAUSE,
    LONGEST_REST,
    UNANSWERED_OUTCOMES,
    UNANSWERED_SECONDS,
)
from cluster.decoding.events import (
    Admitted,
    Cancelled,
    DraftDeclined,
    DrafterJoined,
    Proposal,
    Proposed,
    SequenceVerdict,
    StepDone,
    TargetJoined,
)
from cluster.decoding.instructions import CloseDraft, Instruction, OpenDraft, RunStep, Suspect
from cluster.decoding.scheduler import Scheduler
from paceline.prefix_hash import hash_prefix
from tests.cluster.decoding.true_text import VOCAB_SIZE, request


class Steps:
    """Plain steps, one after the other, at times that a test chooses."""

    def __init__(self, *sequences: int, drafters: Iterable[str] = ("d",)) -> None:
        self.scheduler = Scheduler()
        self.now = 0.0
        self.step: RunStep | None = None
        self.asked: list[tuple[float, str, int]] = []
        """(time, drafter, sequence) of each request to draft."""
        self.closed: list[str] = []
        self.suspects: list[str] = []
        self.carry_out(self.scheduler.handle(TargetJoined(0, VOCAB_SIZE, 9000, 16, 5000)))
        for name in drafters:
            self.carry_out(self.scheduler.handle(DrafterJoined(0, name, 9000)))
        for number in sequences:
            asked = request(number, (1, 2, 3), max_tokens=8000, policy="chain")
            self.carry_out(self.scheduler.handle(Admitted(0, asked)))

    def carry_out(self, instructions: Iterable[Instruction]) -> None:
        for one in instructions:
            match one:
                case RunStep():
                    self.step = one
                case OpenDraft(drafter, sequence_id):
                    self.asked.append((self.now, drafter, sequence_id))
                    assert one.vocab_size == VOCAB_SIZE
                case CloseDraft(drafter, _):
                    self.closed.append(drafter)
                case Suspect(drafter, _):
                    self.suspects.append(drafter)
                case _:
                    pass
        self.scheduler.check_integrity()

    def answer(self, seconds: float, count: int = 1) -> None:
        """Answer `count` steps of `seconds` each; only the target's token is committed."""
        for _ in range(count):
            self.now += seconds
            assert self.step is not None
            step = self.step
            verdicts = [
                SequenceVerdict(one.sequence_id, 0, 7) for one in step.slices if one.verdict
            ]
            done = StepDone(self.now, step.step, tuple(verdicts), seconds)
            self.carry_out(self.scheduler.handle(done))

    def decline(self, sequence_id: int, *, drafter: str = "d", for_good: bool = False) -> None:
        declined = DraftDeclined(self.now, drafter, sequence_id, for_good=for_good)
        self.carry_out(self.scheduler.handle(declined))

    def tell(self, *proposals: Proposal, entries: int) -> None:
        told = Proposed(self.now, "d", proposals, pass_seconds=0.001, entries=entries)
        self.carry_out(self.scheduler.handle(told))


def test_a_drafter_that_declined_is_asked_again_after_growing_pauses() -> None:
    steps = Steps(1)
    for _ in range(300 * 4):
        if steps.asked and steps.asked[-1][0] == steps.now:
            steps.decline(1)
        steps.answer(0.25)
    times = [when for when, _, _ in steps.asked]
    pauses = [after - before for before, after in pairwise(times)]
    assert pauses[:5] == [FIRST_PAUSE, 4.0, 8.0, 16.0, 32.0]
    assert set(pauses[5:]) == {LONGEST_PAUSE}


def test_one_that_declined_for_good_is_not_asked_again() -> None:
    steps = Steps(1)
    steps.decline(1, for_good=True)
    steps.answer(1.0, 200)
    assert len(steps.asked) == 1


def test_where_one_sequence_leaves_one_that_was_declined_is_offered_again() -> None:
    """Not all of them are offered again, because they would be declined again."""
    steps = Steps(1, 2, 3)
    steps.answer(0.01)
    assert [number for _, _, number in steps.asked] == [1, 2, 3]
    steps.decline(2)
    steps.decline(3)
    steps.answer(0.01, 3)
    assert len(steps.asked) == 3
    steps.carry_out(steps.scheduler.handle(Cancelled(steps.now, 1)))
    steps.answer(0.01, 3)
    assert [number for _, _, number in steps.asked] == [1, 2, 3, 2]


def test_a_drafter_that_answers_nothing_is_left_and_probed_ever_more_seldom() -> None:
    steps = Steps(1)
    steps.answer(0.5, 150 * 2)
    times = [when for when, _, _ in steps.asked]
    assert len(steps.closed) >= 3
    gaps = [after - before for before, after in pairwise(times)]
    assert UNANSWERED_SECONDS + FIRST_REST <= gaps[0] <= UNANSWERED_SECONDS + FIRST_REST + 4
    assert all(before < after for before, after in pairwise(gaps))
    assert gaps[-1] <= UNANSWERED_SECONDS + LONGEST_REST + 4


def test_one_that_answers_now_and_then_is_kept() -> None:
    steps = Steps(1)
    for _ in range(40):
        steps.answer(0.9 * UNANSWERED_SECONDS / UNANSWERED_OUTCOMES, UNANSWERED_OUTCOMES)
        steps.tell(entries=0)
    assert not steps.closed


def test_its_sequences_go_to_another_drafter() -> None:
    steps = Steps(1, drafters=("a", "b"))
    silent = steps.asked[0][1]
    steps.answer(0.5, 2 * int(UNANSWERED_SECONDS) + 4)
    assert [name for _, name, _ in steps.asked] == [silent, "b" if silent == "a" else "a"]


def test_one_that_tells_more_than_it_is_granted_is_suspect() -> None:
    steps = Steps(1)
    for _ in range(500):
        steps.tell(entries=0)
    assert steps.suspects == ["d"]


def test_one_that_tells_what_it_is_granted_never_is() -> None:
    """It sends all nodes of its grant, each in its own message, between every two outcomes."""
    steps = Steps(1)
    path = [1, 2, 3]
    for _ in range(300):
        for depth in range(9):
            base = [*path, *[7, *[9] * 8][:depth]]
            told = Proposal(1, len(base), hash_prefix(base), (9 if depth else 7,))
            steps.tell(told, entries=3)
        steps.answer(0.01)
        path.append(7)
    assert not steps.suspects
    assert steps.scheduler.totals.counts.drafted > 50

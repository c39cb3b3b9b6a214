"""The driver's work for a step depends on what is new in it, not on the length of the texts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from cluster.decoding.events import (
    Admitted,
    DrafterJoined,
    Event,
    Proposal,
    Proposed,
    Request,
    SequenceVerdict,
    StepDone,
    TargetJoined,
)
from cluster.decoding.instructions import Instruction, OpenDraft, RunStep, Slice
from cluster.decoding.scheduler import Scheduler
from cluster.driver.worker_messages import drafts_to_wire, step_to_wire
from paceline.prefix_hash import hash_on, hash_prefix
from paceline.sampling import SamplingParams, SequenceSpec
from tests.work_done import calls_of, peak_bytes
from workers.process.settings import YOUNG_OBJECTS, freeze_present_objects

SHORT, LONG = 1_000, 32_000
BLOCK_SIZE = 128
FEW_BYTES = 64 * 1024
"""More than a step of one sequence allocates. The tokens of the long text take 256 KiB."""


class OneSequence:
    """A scheduler with one long sequence of policy `chain`, and a drafter that is always right."""

    def __init__(self, length: int) -> None:
        self.scheduler = Scheduler(serves_auto=False)
        self.step: RunStep | None = None
        self.length = length
        self.prompt = tuple(number % 97 for number in range(length))
        self.prefix_hash = hash_prefix(self.prompt)
        self.send(TargetJoined(0.0, 100, 2 * LONG, BLOCK_SIZE, LONG // BLOCK_SIZE + 9))
        self.send(DrafterJoined(0.0, "d", 2 * LONG))
        spec = SequenceSpec(SamplingParams(temperature=0.0), seed=1, prompt_length=length)
        request = Request(1, self.prompt, spec, 99, "chain", 8, prefix_hash=self.prefix_hash)
        self.admitted = Admitted(0.0, request)

    def send(self, event: Event) -> None:
        """Hand in an event, and write the messages that it causes."""
        for instruction in self.scheduler.handle(event):
            self._carry_out(instruction)

    def _carry_out(self, instruction: Instruction) -> None:
        if isinstance(instruction, RunStep):
            self.step = instruction
            step_to_wire(instruction)
        elif isinstance(instruction, OpenDraft):
            drafts_to_wire([instruction])

    def prefill(self) -> None:
        """Run until the first token."""
        while not any(part.verdict for part in self.steps()):
            self.answer()

    def steps(self) -> Iterator[Slice]:
        assert self.step is not None
        return iter(self.step.slices)

    def answer(self) -> None:
        """Answer the step in flight: all candidates were right."""
        step, verdicts = self.step, []
        assert step is not None
        for part in step.slices:
            if part.verdict:
                verdicts.append(SequenceVerdict(1, part.window, 5))
                accepted = part.token_ids[len(part.token_ids) - part.window :]
                self.prefix_hash = hash_on(self.prefix_hash, (*accepted, 5))
                self.length += part.window + 1
        self.send(StepDone(0.0, step.step, tuple(verdicts), step_seconds=0.01))

    def decode(self) -> None:
        """Draft four tokens, and run the step that verifies the four before them."""
        self.send(Proposed(0.0, "d", (Proposal(1, self.length, self.prefix_hash, (5, 5, 5, 5)),)))
        self.answer()


def test_a_long_prompt_is_admitted_without_a_look_at_each_token() -> None:
    """The request brings its hash; keys of blocks take a few calls for each 128 tokens."""
    short, long = (OneSequence(length) for length in (SHORT, LONG))
    most = calls_of(lambda: short.send(short.admitted)) + 8 * LONG // BLOCK_SIZE
    assert calls_of(lambda: long.send(long.admitted)) < most
    long.scheduler.check_integrity()


@pytest.mark.parametrize("act", [OneSequence.decode, OneSequence.answer])
def test_a_step_of_a_long_text_is_that_of_a_short_one(act: Callable[[OneSequence], None]) -> None:
    done = []
    for length in (SHORT, LONG):
        one = OneSequence(length)
        one.send(one.admitted)
        one.prefill()
        for _ in range(3):
            one.answer()
            one.decode()
        done.append(calls_of(partial(act, one)))
        assert peak_bytes(partial(act, one)) < FEW_BYTES
        one.scheduler.check_integrity()
    assert done[1] <= 1.1 * done[0]


def test_the_collector_does_not_look_at_what_a_step_frees_by_itself() -> None:
    """Otherwise it would visit 1,000 sequences' values 33 times a step, and sometimes all texts."""
    looks: list[str] = []
    before = gc.get_threshold()
    try:
        freeze_present_objects()
        gc.callbacks.append(lambda phase, info: looks.append(phase))
        held = [[number] for number in range(YOUNG_OBJECTS // 2)]
        del held
        assert not looks
    finally:
        gc.callbacks.pop()
        gc.set_threshold(*before)
        gc.unfreeze()

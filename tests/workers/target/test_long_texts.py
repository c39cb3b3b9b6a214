"""A worker's work for a step depends on what is new in it, not on the length of the text."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
import torch

from paceline.sampling import SamplingParams, SequenceSpec
from paceline.v1 import target_pb2
from paceline.wire.sequences import spec_to_wire
from tests.work_done import calls_of, peak_bytes
from workers.drafting.desk import DraftingDesk, DraftingSession, SessionNews
from workers.drafting.kinds.ngram import NgramProposer
from workers.drafting.tree import Grant
from workers.target.step_sequences import EngineLimits, TargetSession
from workers.target.verdicts import verify_on_host
from workers.verification.verify import Verdict

SHORT, LONG = 1_000, 32_000
VOCAB = 500
BLOCK = 128
LIMITS = EngineLimits(VOCAB, max_model_len=2 * LONG, block_size=BLOCK, num_blocks=2 * LONG // BLOCK)
FEW_BYTES = 64 * 1024
"""More than a step of one sequence allocates. The tokens of the long text take 256 KiB."""
PENALIZED = SamplingParams(temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.2)
WINDOW = 8


TEXT = random.Random(5).choices(range(VOCAB), k=LONG)


def verdicts(length: int, sampling: SamplingParams) -> Iterator[Verdict]:
    """Verdicts of steps of a session with one sequence of `length` tokens; none is accepted."""
    session, prompt = TargetSession(LIMITS), TEXT[:length]
    spec = SequenceSpec(sampling, seed=1, prompt_length=length // 2)
    logits_RV = torch.randn(1 + WINDOW, VOCAB, generator=torch.Generator().manual_seed(2))
    opened = target_pb2.StepRequest(step=1)
    opened.open.add(sequence_id=1, spec=spec_to_wire(spec))
    blocks = range(-(-(length + 1000) // BLOCK))
    opened.slices.add(sequence_id=1, token_ids=prompt, new_blocks=blocks)
    session.begin_step(opened)
    number, start = 2, length
    while True:
        request = target_pb2.StepRequest(step=number)
        fed = [start % VOCAB] * (1 + WINDOW)
        request.slices.add(sequence_id=1, start=start, token_ids=fed, window=WINDOW, verdict=True)
        work = session.begin_step(request)
        (verdict,) = verify_on_host([logits_RV], work.tasks)
        yield verdict
        number, start = number + 1, start + 1 + verdict.num_accepted


def least_seconds(length: int) -> float:
    """Processor time of a step with penalties, the least of many because others disturb some."""
    taken, steps = [], verdicts(length, PENALIZED)
    next(steps)
    for _ in range(40):
        begin = time.process_time()
        next(steps)
        taken.append(time.process_time() - begin)
    return min(taken)


@pytest.mark.timing
def test_penalties_of_a_long_text_take_what_those_of_a_short_one_take() -> None:
    """If each row counted all tokens anew, 32 times as many tokens would take 30 times as long."""
    assert least_seconds(LONG) < 5 * least_seconds(SHORT)


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), PENALIZED])
def test_a_step_copies_no_text(sampling: SamplingParams) -> None:
    steps = verdicts(LONG, sampling)
    for _ in range(3):
        next(steps)
    assert peak_bytes(lambda: next(steps)) < FEW_BYTES


def opened(desk: DraftingDesk, text: list[int]) -> DraftingSession:
    """Open a session whose only sequence is number 1."""
    session = desk.open_session()
    spec = SequenceSpec(SamplingParams(temperature=0.0), seed=1, prompt_length=len(text))
    assert session.open(1, spec, text) is None
    session.grant(1, Grant(until_position=len(text) + WINDOW))
    return session


def drafted(desk: DraftingDesk) -> list[int]:
    """Run passes until there is no work left. Returns all drafts."""
    found: list[int] = []
    while desk.has_work:
        for news in desk.run_pass():
            for proposal in news.proposals:
                found += proposal.token_ids
        desk.check_integrity()
    return found


def test_a_draft_copies_no_text() -> None:
    desk = DraftingDesk(NgramProposer(), max_sequences=9)
    session = opened(desk, TEXT)
    for position in range(LONG, LONG + 3):
        assert drafted(desk)
        session.outcome(1, position, [position % VOCAB])
        session.grant(1, Grant(until_position=position + WINDOW))
    assert peak_bytes(desk.run_pass) < FEW_BYTES


def test_a_long_text_is_taken_in_beside_the_drafts_of_others() -> None:
    """No call works on more than one piece of it. The other driver drafts in every other pass."""
    desk = DraftingDesk(NgramProposer(), max_sequences=9)
    session = opened(desk, TEXT[:2_000])
    alone = calls_of(lambda: opened(DraftingDesk(NgramProposer(), max_sequences=9), TEXT[:2_000]))
    assert calls_of(lambda: opened(desk, TEXT)) < 2 * alone
    passes, all_news = 0, list[SessionNews]()
    while desk.opening:
        session.outcome(1, 2_000 + passes, [7])
        session.grant(1, Grant(until_position=2_000 + passes + WINDOW))
        assert calls_of(lambda: all_news.extend(desk.run_pass())) < 3 * alone
        passes += 1
    drafts = [draft for news in all_news if news.session is session for draft in news.proposals]
    assert 2 * len(drafts) + 1 >= passes > 10, "it waited for a long text"


def test_a_text_that_grows_while_it_is_taken_in() -> None:
    """The drafts equal those of a text that came at once. Closing half-way leaves nothing."""
    desk = DraftingDesk(NgramProposer(), max_sequences=9)
    text = TEXT[:20_000]
    session = opened(desk, text)
    desk.run_pass()
    for _ in range(3):
        new = [text[7], text[8], text[9]]
        session.outcome(1, len(text), new)
        text += new
        desk.run_pass()
        desk.check_integrity()
    session.grant(1, Grant(until_position=len(text) + WINDOW))
    at_once = DraftingDesk(NgramProposer(), max_sequences=9)
    opened(at_once, text)
    assert drafted(desk) == drafted(at_once) != []
    opened(desk, TEXT[:20_000]).close(1)
    assert not desk.has_work
    desk.check_integrity()

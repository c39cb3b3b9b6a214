"""The driver's rehearsals: sound, without end, and only where they are worth it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from cluster.decoding.events import Request
from cluster.decoding.instructions import RunStep
from cluster.decoding.policies import PolicyName
from cluster.decoding.scheduler import Scheduler
from cluster.dispatch import Dispatch
from cluster.drafter_link import DrafterDescription
from cluster.generation import Generation
from cluster.rehearsal import Rehearsal
from cluster.requests import ResolvedRequest, Speculation
from cluster.target_description import TargetDescription
from cluster.text import TextCodec, TextStream
from paceline.errors import UnavailableError
from paceline.prefix_hash import hash_prefix
from paceline.rules import Rule
from paceline.sampling import SamplingParams, SequenceSpec
from paceline.v1 import drafting_pb2, target_pb2
from tests.tiny import make_tiny_checkpoint


async def test_sequences_follow_each_other_and_nothing_is_leaked() -> None:
    rehearsal = Rehearsal()
    windows = set()
    for _ in range(400):
        rehearsal.run()
        rehearsal.check_integrity()
        windows.add(rehearsal.window)
    assert rehearsal.num_finished > 2
    assert max(windows) > 0, "no candidate was verified"


class _Counted(Rehearsal):
    def __init__(self) -> None:
        super().__init__()
        self.runs = asyncio.Queue[None]()

    def run(self) -> None:
        super().run()
        self.runs.put_nowait(None)


async def test_it_rehearses_before_an_answer_that_takes_long_and_not_otherwise() -> None:
    rehearsal = _Counted()
    rehearsal.expect(0.001, sequences=1)
    assert not rehearsal.expects
    rehearsal.expect(0.02, sequences=64)
    assert not rehearsal.expects
    for _ in range(2):
        rehearsal.expect(0.02, sequences=1)
        assert rehearsal.expects
        await asyncio.wait_for(rehearsal.runs.get(), 30)
        assert not rehearsal.expects
    rehearsal.expect(0.02, sequences=1)
    rehearsal.end()
    assert not rehearsal.expects


def _waiting_request(folder: Path, dispatch: Dispatch) -> tuple[Request, Generation]:
    """One whose every step waits for two drafted tokens."""
    prompt, speculation = (5, 6), Speculation(PolicyName.LOCKSTEP, window=2)
    spec = SequenceSpec(SamplingParams(temperature=0.0), seed=0, prompt_length=len(prompt))
    resolved = ResolvedRequest("a", prompt, spec, 9, (), speculation, "")
    text = TextStream(TextCodec(make_tiny_checkpoint(folder)), end_token_ids=())
    request = Request(1, prompt, spec, 9, policy=PolicyName.LOCKSTEP, window=2)
    return request, Generation(resolved, 1, text, dispatch)


async def test_the_answer_of_a_step_that_waited_for_its_drafter_is_rehearsed(
    tmp_path: Path,
) -> None:
    dispatch = Dispatch(Scheduler(wait_seconds=600), target_patience=600)
    steps: list[RunStep] = []
    dispatch.connect(steps.append, lambda name, messages: None, lambda name: None)
    dispatch.target_joined(0, TargetDescription("tiny", 384, 512, 16, 64))
    dispatch.drafter_joined("d", DrafterDescription("model", 512, frozenset({Rule.COUPLED}), False))
    dispatch.admit(*_waiting_request(tmp_path, dispatch))
    await asyncio.sleep(0)
    answer = target_pb2.StepResponse(step=1, step_seconds=600.0)
    answer.verdicts.add(sequence_id=1, token_id=7)
    dispatch.step_answered(0, answer)
    await asyncio.sleep(0)
    assert (len(steps), dispatch.rehearsal.expects) == (1, False), "nothing is on its way"
    told = (5, 6, 7)
    proposal = drafting_pb2.Proposal(sequence_id=1, token_ids=[8, 9])
    proposal.base.length, proposal.base.hash = len(told), hash_prefix(told)
    dispatch.proposed("d", drafting_pb2.ProposalBatch(proposals=[proposal], pass_seconds=0.1), 1)
    await asyncio.sleep(0)
    assert (len(steps), dispatch.rehearsal.expects) == (2, True)
    dispatch.stop(UnavailableError("the test is over"))
    assert not dispatch.rehearsal.expects

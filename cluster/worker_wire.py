"""Between the scheduler's plain values and the messages of target.proto and drafting.proto."""

from __future__ import annotations

from cluster.decoding.events import Proposal, SequenceVerdict
from cluster.decoding.instructions import CloseDraft, Grant, OpenDraft, RunStep, SendOutcome
from paceline.convert import spec_to_wire
from paceline.v1 import drafting_pb2, target_pb2

MAX_PROPOSED_TOKENS = 1024

DraftInstruction = OpenDraft | SendOutcome | Grant | CloseDraft


def step_to_wire(step: RunStep) -> target_pb2.StepRequest:
    """The message of a step."""
    request = target_pb2.StepRequest(
        step=step.step,
        close=step.close,
        slices=[
            target_pb2.Slice(
                sequence_id=part.sequence_id,
                start=part.start,
                token_ids=part.token_ids,
                window=part.window,
                verdict=part.verdict,
                new_blocks=part.new_blocks,
            )
            for part in step.slices
        ],
    )
    for sequence_id, spec in step.open:
        request.open.add(sequence_id=sequence_id, spec=spec_to_wire(spec))
    return request


def verdicts_from_wire(response: target_pb2.StepResponse) -> tuple[SequenceVerdict, ...]:
    """The verdicts of an answered step."""
    return tuple(
        SequenceVerdict(verdict.sequence_id, verdict.num_accepted, verdict.token_id)
        for verdict in response.verdicts
    )


def draft_to_wire(instruction: DraftInstruction) -> drafting_pb2.DraftRequest:
    """The message of an instruction about a drafter."""
    match instruction:
        case SendOutcome():
            outcome = drafting_pb2.Outcome(
                sequence_id=instruction.sequence_id,
                position=instruction.position,
                token_ids=instruction.token_ids,
            )
            return drafting_pb2.DraftRequest(outcome=outcome)
        case Grant():
            grant = drafting_pb2.Grant(
                sequence_id=instruction.sequence_id,
                until_position=instruction.until_position,
                branches=instruction.branches,
            )
            return drafting_pb2.DraftRequest(grant=grant)
        case OpenDraft():
            opened = drafting_pb2.OpenSequence(
                sequence_id=instruction.sequence_id,
                spec=spec_to_wire(instruction.spec),
                token_ids=instruction.token_ids,
            )
            return drafting_pb2.DraftRequest(open=opened)
        case CloseDraft():
            close = drafting_pb2.CloseSequence(sequence_id=instruction.sequence_id)
            return drafting_pb2.DraftRequest(close=close)


def proposals_from_wire(batch: drafting_pb2.ProposalBatch) -> tuple[Proposal, ...]:
    """The proposals of a pass. Those with more tokens than the contract allows are left out."""
    return tuple(
        Proposal(
            proposal.sequence_id,
            proposal.base.length,
            proposal.base.hash,
            tuple(proposal.token_ids),
            proposal.last,
        )
        for proposal in batch.proposals
        if len(proposal.token_ids) <= MAX_PROPOSED_TOKENS
    )

"""Between the scheduler's plain values and the messages of target.proto and drafting.proto."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from cluster.decoding.events import SequenceVerdict, TopTokens
from cluster.decoding.instructions import (
    CloseDraft,
    Grant,
    OpenDraft,
    RunStep,
    SendOutcome,
    Slice,
)
from paceline.convert import rule_from_wire, spec_to_wire, stopping_to_wire
from paceline.errors import InvalidRequestError
from paceline.rules import Rule
from paceline.v1 import drafting_pb2, target_pb2, types_pb2
from workers.draft_probs_wire import distributions_to_wire

DraftInstruction = OpenDraft | SendOutcome | Grant | CloseDraft


def step_to_wire(step: RunStep) -> target_pb2.StepRequest:
    """The message of a step."""
    request = target_pb2.StepRequest(step=step.step, close=step.close)
    for part in step.slices:
        _fill_slice(request.slices.add(), part)
    for opened in step.open:
        request.open.add(
            sequence_id=opened.sequence_id,
            spec=spec_to_wire(opened.spec),
            shared_blocks=opened.shared_blocks,
            token_ids=opened.token_ids,
        )
    return request


def _fill_slice(message: target_pb2.Slice, part: Slice) -> None:
    """Fields that are not set cost nothing, and most slices have the first few alone."""
    message.sequence_id = part.sequence_id
    message.start = part.start
    message.token_ids.extend(part.token_ids)
    message.verdict = part.verdict
    if part.window:
        message.window = part.window
    if part.new_blocks:
        message.new_blocks.extend(part.new_blocks)
    if part.parents:
        message.parents.extend(part.parents)
    for source, goal in part.kv_moves:
        message.kv_moves.add(from_position=source, to_position=goal)
    if part.distributions:
        message.distributions.extend(distributions_to_wire(part.distributions))
    if part.multiplicities:
        message.multiplicities.extend(part.multiplicities)
    if part.top_tokens:
        message.top_tokens = part.top_tokens


def verdicts_from_wire(response: target_pb2.StepResponse) -> tuple[SequenceVerdict, ...]:
    """The verdicts of an answered step."""
    return tuple([_verdict_from_wire(verdict) for verdict in response.verdicts])


def _verdict_from_wire(verdict: target_pb2.Verdict) -> SequenceVerdict:
    """Of most verdicts there is no more than the first three fields."""
    accepted, top = verdict.accepted, verdict.top_tokens
    return SequenceVerdict(
        verdict.sequence_id,
        verdict.num_accepted,
        verdict.token_id,
        tuple(accepted) if accepted else (),
        tuple(map(_top_tokens_from_wire, top)) if top else (),
        verdict.error or None,
    )


def _top_tokens_from_wire(message: types_pb2.TopTokens) -> TopTokens:
    previous_id = message.previous_id if message.HasField("previous_id") else None
    return TopTokens(message.token_id, tuple(message.top_ids), previous_id)


def drafts_to_wire(instructions: Sequence[DraftInstruction]) -> drafting_pb2.DraftRequest:
    """The one message of all instructions for a drafter, of which there is at least one."""
    request = drafting_pb2.DraftRequest()
    if len(instructions) == 1:
        _fill_request(request, instructions[0])
        return request
    batch = request.batch.requests
    for instruction in instructions:
        _fill_request(batch.add(), instruction)
    return request


def _fill_request(request: drafting_pb2.DraftRequest, instruction: DraftInstruction) -> None:
    """The message of an instruction, filled where it lies: to make it and copy it takes longer."""
    if isinstance(instruction, SendOutcome):
        outcome = request.outcome
        outcome.sequence_id = instruction.sequence_id
        outcome.position = instruction.position
        outcome.token_ids.extend(instruction.token_ids)
        for top in instruction.top_tokens:
            outcome.top_tokens.add(
                token_id=top.token_id, top_ids=top.top_ids, previous_id=top.previous_id
            )
    elif isinstance(instruction, Grant):
        _fill_grant(request.grant, instruction)
    elif isinstance(instruction, OpenDraft):
        opened = request.open
        opened.sequence_id = instruction.sequence_id
        opened.spec.CopyFrom(spec_to_wire(instruction.spec))
        opened.token_ids.extend(instruction.token_ids)
        opened.drafting.stopping = stopping_to_wire(instruction.stopping)
        opened.tenant = instruction.tenant
    else:
        request.close.sequence_id = instruction.sequence_id


def _fill_grant(message: drafting_pb2.Grant, grant: Grant) -> None:
    """Fields that are not set cost nothing, and most grants have the first few alone."""
    message.sequence_id = grant.sequence_id
    message.until_position = grant.until_position
    message.branches = grant.branches
    message.nodes = grant.nodes
    if grant.tokens_per_ms:
        message.tokens_per_ms = grant.tokens_per_ms
    if grant.step_ms_per_candidate:
        message.step_ms_per_candidate = grant.step_ms_per_candidate
    if grant.drafting_is_free:
        message.drafting_is_free = True
    if grant.fan_out:
        message.fan_out = grant.fan_out
    if grant.shares:
        message.share = grant.share
        message.shares = grant.shares


def rules_from_wire(numbers: Sequence[int]) -> frozenset[Rule]:
    """The rules that a drafter names, the coupled one where it names none.

    Rules that this version does not know are left out.
    """
    if not numbers:
        return frozenset({Rule.COUPLED})
    rules = set()
    for number in numbers:
        with contextlib.suppress(InvalidRequestError):
            rules.add(rule_from_wire(number))
    return frozenset(rules)

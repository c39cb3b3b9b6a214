"""Converts the scheduler's values to messages of target.proto and drafting.proto, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from google.protobuf.message import Message

from cluster.decoding.events import FedTopTokens, SequenceVerdict, TopTokens
from cluster.decoding.instructions import (
    CloseDraft,
    Grant,
    OpenDraft,
    RunStep,
    SendOutcome,
    Slice,
)
from paceline.channel import PART_BYTES
from paceline.v1 import drafting_pb2, target_pb2, types_pb2
from paceline.wire import spec_to_wire, stopping_to_wire
from workers.drafting.draft_probs_wire import distributions_to_wire
from workers.verification.rule import RULES

DraftInstruction = OpenDraft | SendOutcome | Grant | CloseDraft

MessageT = TypeVar("MessageT", bound=Message)

_HEADER_BYTES = 8
"""Most bytes in front of a nested message: its field and its length."""


def step_messages(step: RunStep) -> Sequence[target_pb2.StepRequest]:
    """A step in as many messages as it needs: usually one.

    These are the largest parts that cannot be split. Opening a sequence takes at most 5 bytes for
    each of MAX_SEQUENCE_TOKENS (10 MiB), as much for a sixteenth of them, which are blocks, and 60
    KiB for the spec, by the limits of a request. A slice has at most 65 distributions of 9 KiB, and
    5 bytes a token. A slice without distributions is no larger than what the step feeds, so its
    size is not computed.
    """
    request = target_pb2.StepRequest(step=step.step, close=step.close)
    if not (_fill_step(request, step) or step.open):
        return (request,)
    parts = _in_parts([*request.open, *request.slices])
    if len(parts) == 1:
        return (request,)
    messages = []
    for part in parts:
        message = target_pb2.StepRequest(step=step.step, more=True)
        message.open.extend([one for one in part if isinstance(one, target_pb2.TargetSequence)])
        message.slices.extend([one for one in part if isinstance(one, target_pb2.Slice)])
        messages.append(message)
    messages[0].close.extend(step.close)
    messages[-1].more = False
    return messages


def _in_parts(messages: Iterable[MessageT]) -> list[list[MessageT]]:
    """Split messages, in order, into lists of at most PART_BYTES or one message. At least one."""
    parts: list[list[MessageT]] = [[]]
    room = PART_BYTES
    for message in messages:
        size = message.ByteSize() + _HEADER_BYTES
        if size > room and parts[-1]:
            parts.append([])
            room = PART_BYTES
        parts[-1].append(message)
        room -= size
    return parts


def step_to_wire(step: RunStep) -> target_pb2.StepRequest:
    """A whole step in one message. It may be too large for gRPC (`step_messages`)."""
    request = target_pb2.StepRequest(step=step.step, close=step.close)
    _fill_step(request, step)
    return request


def _fill_step(request: target_pb2.StepRequest, step: RunStep) -> bool:
    """Fill in slices and opens. Returns whether a slice may be large."""
    has_distributions = False
    for part in step.slices:
        if _fill_slice(request.slices.add(), part):
            has_distributions = True
    for opened in step.open:
        request.open.add(
            sequence_id=opened.sequence_id,
            spec=spec_to_wire(opened.spec),
            shared_blocks=opened.shared_blocks,
            token_ids=opened.token_ids,
        )
    return has_distributions


def _fill_slice(message: target_pb2.Slice, part: Slice) -> bool:
    """Fill in a slice. Returns whether it has distributions, without which it is small.

    Unset fields cost nothing, and most slices need only the first few.
    """
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
    return bool(part.distributions)


def verdicts_from_wire(response: target_pb2.StepResponse) -> tuple[SequenceVerdict, ...]:
    """The verdicts of an answered step."""
    return tuple([_verdict_from_wire(verdict) for verdict in response.verdicts])


def _verdict_from_wire(verdict: target_pb2.Verdict) -> SequenceVerdict:
    """A verdict. Most have no more than the first three fields."""
    accepted, top = verdict.accepted, verdict.top_tokens
    return SequenceVerdict(
        verdict.sequence_id,
        verdict.num_accepted,
        verdict.token_id,
        tuple(accepted) if accepted else (),
        tuple(map(_top_tokens_from_wire, top)) if top else (),
        verdict.error or None,
    )


def fed_from_wire(response: target_pb2.StepResponse) -> tuple[FedTopTokens, ...]:
    """What an answer reports of tokens fed by slices without a verdict."""
    return tuple(
        [
            FedTopTokens(fed.sequence_id, tuple(map(_top_tokens_from_wire, fed.top_tokens)))
            for fed in response.fed
        ]
    )


def _top_tokens_from_wire(message: types_pb2.TopTokens) -> TopTokens:
    previous_id = message.previous_id if message.HasField("previous_id") else None
    return TopTokens(message.token_id, tuple(message.top_ids), previous_id)


def drafts_to_wire(
    instructions: Sequence[DraftInstruction],
) -> Sequence[drafting_pb2.DraftRequest]:
    """Instructions for one drafter, at least one, in one message or several.

    Several are needed if sequences are opened and make one message too large. Opening a sequence
    takes less than at the target (`step_messages`).
    """
    request = drafting_pb2.DraftRequest()
    if len(instructions) == 1:
        _fill_request(request, instructions[0])
        return (request,)
    batch = request.batch.requests
    opens = False
    for instruction in instructions:
        if _fill_request(batch.add(), instruction):
            opens = True
    if not opens:
        return (request,)
    parts = _in_parts(batch)
    if len(parts) == 1:
        return (request,)
    return [_batch_of(part) for part in parts]


def _batch_of(requests: Sequence[drafting_pb2.DraftRequest]) -> drafting_pb2.DraftRequest:
    return drafting_pb2.DraftRequest(batch=drafting_pb2.DraftRequestBatch(requests=requests))


def _fill_request(request: drafting_pb2.DraftRequest, instruction: DraftInstruction) -> bool:
    """Fill in the message of an instruction, in place because a copy takes longer.

    Returns whether it may be large.
    """
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
        opened.target_vocab_size = instruction.vocab_size
        return True
    else:
        request.close.sequence_id = instruction.sequence_id
    return False


def _fill_grant(message: drafting_pb2.Grant, grant: Grant) -> None:
    """Fill in a grant. Unset fields cost nothing, and most grants need only the first few."""
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


def rules_from_wire(names: Sequence[str]) -> frozenset[str]:
    """The rules that a drafter names; if it names none, the coupled rule.

    Rules that this version does not know are left out.
    """
    return frozenset(name for name in names or ("coupled",) if name in RULES)

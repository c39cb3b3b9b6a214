"""Converts the scheduler's values to messages of target.proto and drafting.proto, and back.

Targets are trusted. What drafters send is checked, and dropped if it breaks the contract.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from google.protobuf.message import Message

from cluster.decoding.drafters import MALFORMED_LIMIT
from cluster.decoding.events import (
    FedTopTokens,
    MalformedProposal,
    Proposal,
    Proposed,
    SequenceVerdict,
)
from cluster.decoding.instructions import (
    DraftInstruction,
    Instruction,
    OpenDraft,
    RunStep,
    SendGrant,
    SendOutcome,
    Slice,
    Suspect,
)
from cluster.driver.fitting import Speculation, widest_proposal
from paceline.channel import PART_BYTES
from paceline.errors import ProtocolError
from paceline.generation import TokenLogprobs
from paceline.limits import MAX_PROPOSED
from paceline.v1 import drafting_pb2, target_pb2
from paceline.wire.answers import logprobs_from_wire
from paceline.wire.sequences import spec_to_wire, stopping_to_wire
from workers.drafting.tree import Grant
from workers.drafting.wire import (
    distributions_from_wire,
    distributions_to_wire,
    top_tokens_from_wire,
)
from workers.verification.candidates import CandidateTree, DraftProbs, check_proposal
from workers.verification.rule import RULES, rule_named

MAX_STOPPING_VALUES = 16
"""Most numbers in the state of a stopping rule. Our rules report four."""
MAX_STOPPING_NAME = 64
"""Most characters in the name of such a number. The name is kept and reported with the request."""
_HEADER_BYTES = 8
"""Most bytes in front of a nested message: its field and its length."""
SpeculationOf = Callable[[int], Speculation | None]
"""How a sequence is decoded, by its id; None: it has ended or never existed."""
MessageT = TypeVar("MessageT", bound=Message)
_log = logging.getLogger(__name__)


def step_messages(step: RunStep) -> Sequence[target_pb2.StepRequest]:
    """A step in as many messages as it needs: usually one.

    The opening of a sequence and a slice cannot be split. By the limits of a request, an opening
    takes at most 5 bytes for each of MAX_SEQUENCE_TOKENS (10 MiB), 5 bytes for each block (one for
    16 tokens), and 60 KiB for the spec. A slice has at most 65 distributions of 9 KiB, and 5 bytes
    for each token. A slice without distributions is small, so its size is not computed.
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
    if part.logprobs_of:
        message.logprobs_of.extend(part.logprobs_of)
    return bool(part.distributions)


def verdicts_from_wire(response: target_pb2.StepResponse) -> tuple[SequenceVerdict, ...]:
    return tuple([_verdict_from_wire(verdict) for verdict in response.verdicts])


def _verdict_from_wire(verdict: target_pb2.Verdict) -> SequenceVerdict:
    """A verdict. Most have no more than the first three fields."""
    accepted, top = verdict.accepted, verdict.top_tokens
    return SequenceVerdict(
        verdict.sequence_id,
        verdict.num_accepted,
        verdict.token_id,
        tuple(accepted) if accepted else (),
        tuple(map(top_tokens_from_wire, top)) if top else (),
        verdict.error or None,
        logprobs_from_wire(verdict.logprobs) if verdict.logprobs else (),
    )


def fed_from_wire(response: target_pb2.StepResponse) -> tuple[FedTopTokens, ...]:
    """What an answer reports of tokens fed by slices without a verdict."""
    return tuple(
        [
            FedTopTokens(fed.sequence_id, tuple(map(top_tokens_from_wire, fed.top_tokens)))
            for fed in response.fed
        ]
    )


def prompt_logprobs_from_wire(
    response: target_pb2.StepResponse,
) -> Mapping[int, tuple[TokenLogprobs, ...]]:
    """The log probabilities of prompt tokens in an answer, by sequence id."""
    return {
        found.sequence_id: logprobs_from_wire(found.logprobs) for found in response.prompt_logprobs
    }


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
    elif isinstance(instruction, SendGrant):
        request.grant.sequence_id = instruction.sequence_id
        _fill_grant(request.grant, instruction.grant)
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


@dataclass(slots=True)
class ReadBatch:
    """The contents of a message.

    `dropped`: proposals for sequences that have ended. `malformed`: proposals that break the
    contract, which are dropped as well.
    """

    proposals: list[Proposal] = field(default_factory=list)
    dropped: int = 0
    malformed: int = 0


def read_proposals(
    batch: drafting_pb2.ProposalBatch,
    speculation_of: SpeculationOf,
    *,
    vocab_size: int,
    drafter: str,
) -> ReadBatch:
    """The usable proposals in a message of `drafter`.

    Stops reading once the malformed proposals make the drafter suspect.
    """
    read = ReadBatch()
    told: list[drafting_pb2.Proposal | drafting_pb2.Tips] = [*batch.proposals, *batch.tips]
    for message in told:
        try:
            if isinstance(message, drafting_pb2.Tips):
                tips = tips_from_wire(message, speculation_of, vocab_size=vocab_size)
                read.dropped += len(message.token_ids) - len(tips)
                read.proposals += tips
                continue
            speculation = speculation_of(message.sequence_id)
            if speculation is None:
                read.dropped += 1
                continue
            read.proposals.append(proposal_from_wire(message, speculation, vocab_size=vocab_size))
        except ProtocolError as error:
            read.malformed += 1
            if read.malformed == MALFORMED_LIMIT:
                break
            _log.info("a proposal of %s is dropped: %s", drafter, error)
    return read


def draft_events(
    now: float, drafter: str, batch: drafting_pb2.ProposalBatch, read: ReadBatch, entries: int
) -> list[Proposed | MalformedProposal]:
    """The events of a drafter's message of `entries` entries, as `read` at `now`."""
    proposed = Proposed(
        now,
        drafter,
        tuple(read.proposals),
        pass_seconds=batch.pass_seconds,
        entries=entries,
        passes=max(1, batch.passes),
    )
    return [proposed, *[MalformedProposal(now, drafter)] * read.malformed]


def send_drafts(
    instructions: Iterable[Instruction],
    send: Callable[[str, list[DraftInstruction]], None],
    suspect: Callable[[str, str], None],
) -> None:
    """Send instructions for drafters, those of each together; suspects last, as that ends them."""
    messages: dict[str, list[DraftInstruction]] = {}
    suspects: list[Suspect] = []
    for instruction in instructions:
        if isinstance(instruction, Suspect):
            suspects.append(instruction)
        elif isinstance(instruction, DraftInstruction):
            messages.setdefault(instruction.drafter, []).append(instruction)
    for drafter, message in messages.items():
        send(drafter, message)
    for one in suspects:
        suspect(one.drafter, one.reason)


def proposal_from_wire(
    message: drafting_pb2.Proposal, speculation: Speculation, *, vocab_size: int
) -> Proposal:
    """A proposal for a sequence with this `speculation`.

    Raises ProtocolError if it breaks the contract.
    """
    token_ids = tuple(message.token_ids)
    draft_probs = None
    if not _is_sound_chain(message, token_ids, speculation.rule, vocab_size):
        draft_probs = _check_candidates(message, token_ids, speculation, vocab_size)
    return Proposal(
        sequence_id=message.sequence_id,
        base_length=message.base.length,
        base_hash=message.base.hash,
        token_ids=token_ids,
        last=message.last,
        parents=tuple(message.parents),
        multiplicities=tuple(message.multiplicities),
        distributions={} if draft_probs is None else draft_probs.of_node,
        stopping_state=_stopping_state(message),
    )


def tips_from_wire(
    message: drafting_pb2.Tips, speculation_of: SpeculationOf, *, vocab_size: int
) -> list[Proposal]:
    """Proposals of one token each, without those for sequences that have ended.

    Raises ProtocolError if they break the contract.
    """
    lengths, hashes = list(message.base_lengths), list(message.base_hashes)
    token_ids = list(message.token_ids)
    sequence_ids = list(message.sequence_ids) or [message.sequence_id] * len(token_ids)
    sizes = {len(lengths), len(hashes), len(token_ids), len(sequence_ids)}
    if len(sizes) > 1 or not 0 < len(token_ids) <= MAX_PROPOSED:
        raise ProtocolError(
            f"tips: expected 1 to {MAX_PROPOSED} base_lengths and as many base_hashes, token_ids "
            f"and sequence_ids, got {len(lengths)}, {len(hashes)}, {len(token_ids)} and "
            f"{len(sequence_ids)}"
        )
    if max(token_ids) >= vocab_size:
        raise ProtocolError(
            f"tips.token_ids: expected ids below {vocab_size}, got {max(token_ids)}"
        )
    known: set[int] = set()
    for sequence_id in set(sequence_ids):
        speculation = speculation_of(sequence_id)
        if speculation is None:
            continue
        known.add(sequence_id)
        if rule_named(speculation.rule).needs_draft_probs:
            raise ProtocolError(
                f"tips: expected none for sequence {sequence_id} under the rule "
                f"{speculation.rule!r}: send proposals with distributions"
            )
    last_of = set(message.last_of)
    if not last_of.issubset(sequence_ids):
        raise ProtocolError(
            "tips.last_of: expected sequences of these entries, got "
            f"{min(last_of.difference(sequence_ids))} as well"
        )
    tips = [
        Proposal(sequence_id, length, prefix_hash, (token_id,))
        for sequence_id, length, prefix_hash, token_id in zip(
            sequence_ids, lengths, hashes, token_ids, strict=True
        )
        if sequence_id in known
    ]
    if last_of:
        _mark_last(tips, last_of)
    return tips


def _mark_last(tips: list[Proposal], last_of: set[int]) -> None:
    """Mark the last tip of each of these sequences as last. Empties the set."""
    for index in reversed(range(len(tips))):
        if tips[index].sequence_id in last_of:
            last_of.remove(tips[index].sequence_id)
            tips[index] = replace(tips[index], last=True)


def _is_sound_chain(
    message: drafting_pb2.Proposal, token_ids: tuple[int, ...], rule: str, vocab_size: int
) -> bool:
    """Whether the message is the usual case, which passes `_check_candidates` for certain.

    A driver reads one such message for each sequence and pass, and the full check takes ten times
    as long.
    """
    return (
        rule_named(rule).shares_noise
        and len(token_ids) <= MAX_PROPOSED
        and not (message.parents or message.multiplicities or message.distributions)
        and max(token_ids, default=0) < vocab_size
    )


def _check_candidates(
    message: drafting_pb2.Proposal,
    token_ids: tuple[int, ...],
    speculation: Speculation,
    vocab_size: int,
) -> DraftProbs | None:
    """Raise ProtocolError if rule or grant do not allow these candidates."""
    parents = tuple(message.parents) or tuple(range(len(token_ids)))
    tree = CandidateTree(token_ids, parents, tuple(message.multiplicities))
    draft_probs = distributions_from_wire(message.distributions)
    check_proposal(
        speculation.rule, tree, draft_probs, vocab_size=vocab_size, max_nodes=MAX_PROPOSED
    )
    widest = max(len(tree.copies(node)) for node in range(len(tree) + 1))
    branches = widest_proposal(speculation)
    if widest > branches:
        raise ProtocolError(
            f"expected at most {branches} candidates a position, as granted, got {widest}: "
            "count paths where the rule counts them, else the children of a node"
        )
    return draft_probs


def _stopping_state(message: drafting_pb2.Proposal) -> dict[str, float]:
    count = len(message.stopping_state)
    if not count:
        return {}
    state = dict(message.stopping_state) if count <= MAX_STOPPING_VALUES else {}
    longest = max(map(len, state), default=0)
    if not state or longest > MAX_STOPPING_NAME or not all(map(math.isfinite, state.values())):
        raise ProtocolError(
            f"expected at most {MAX_STOPPING_VALUES} finite numbers with names of at most "
            f"{MAX_STOPPING_NAME} characters as the state of a stopping rule, got {count} with "
            f"names of up to {longest}: name only what an operator can use"
        )
    return state

"""Between the scheduler's plain values and the messages of target.proto and drafting.proto."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

from cluster.decoding.events import Proposal, SequenceVerdict, TopTokens
from cluster.decoding.instructions import (
    CloseDraft,
    Grant,
    OpenDraft,
    RunStep,
    SendOutcome,
    Slice,
)
from paceline.convert import rule_from_wire, spec_to_wire, stopping_to_wire
from paceline.errors import InvalidRequestError, ProtocolError
from paceline.rules import MAX_PROPOSED, Rule
from paceline.v1 import drafting_pb2, target_pb2, types_pb2
from workers.draft_probs_wire import distributions_from_wire, distributions_to_wire
from workers.verification.candidates import CandidateTree
from workers.verification.draft_probs import DraftProbs
from workers.verification.rules import FACTS, check_proposal

MAX_STOPPING_VALUES = 16

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
    return tuple(
        SequenceVerdict(
            sequence_id=verdict.sequence_id,
            num_accepted=verdict.num_accepted,
            token_id=verdict.token_id,
            accepted=tuple(verdict.accepted),
            top_tokens=tuple(map(_top_tokens_from_wire, verdict.top_tokens)),
        )
        for verdict in response.verdicts
    )


def _top_tokens_from_wire(message: types_pb2.TopTokens) -> TopTokens:
    previous_id = message.previous_id if message.HasField("previous_id") else None
    return TopTokens(message.token_id, tuple(message.top_ids), previous_id)


def drafts_to_wire(instructions: Sequence[DraftInstruction]) -> drafting_pb2.DraftRequest:
    """The one message of all instructions for a drafter, of which there is at least one."""
    requests = [draft_to_wire(instruction) for instruction in instructions]
    if len(requests) == 1:
        return requests[0]
    return drafting_pb2.DraftRequest(batch=drafting_pb2.DraftRequestBatch(requests=requests))


def draft_to_wire(instruction: DraftInstruction) -> drafting_pb2.DraftRequest:
    """The message of an instruction about a drafter."""
    match instruction:
        case SendOutcome():
            outcome = drafting_pb2.Outcome(
                sequence_id=instruction.sequence_id,
                position=instruction.position,
                token_ids=instruction.token_ids,
                top_tokens=[
                    types_pb2.TopTokens(
                        token_id=top.token_id, top_ids=top.top_ids, previous_id=top.previous_id
                    )
                    for top in instruction.top_tokens
                ],
            )
            return drafting_pb2.DraftRequest(outcome=outcome)
        case Grant():
            grant = drafting_pb2.Grant(
                sequence_id=instruction.sequence_id,
                until_position=instruction.until_position,
                branches=instruction.branches,
                nodes=instruction.nodes,
                tokens_per_ms=instruction.tokens_per_ms,
                step_ms_per_candidate=instruction.step_ms_per_candidate,
                drafting_is_free=instruction.drafting_is_free,
                fan_out=instruction.fan_out,
                share=instruction.share,
                shares=instruction.shares,
            )
            return drafting_pb2.DraftRequest(grant=grant)
        case OpenDraft():
            opened = drafting_pb2.OpenSequence(
                sequence_id=instruction.sequence_id,
                spec=spec_to_wire(instruction.spec),
                token_ids=instruction.token_ids,
                drafting=drafting_pb2.DraftingParams(
                    stopping=stopping_to_wire(instruction.stopping)
                ),
                tenant=instruction.tenant,
            )
            return drafting_pb2.DraftRequest(open=opened)
        case CloseDraft():
            close = drafting_pb2.CloseSequence(sequence_id=instruction.sequence_id)
            return drafting_pb2.DraftRequest(close=close)


def proposals_from_wire(
    message: drafting_pb2.Proposal | drafting_pb2.Tips,
    rule: Rule,
    *,
    branches: int,
    vocab_size: int,
) -> Sequence[Proposal]:
    """What a message proposes for a sequence under `rule`, with so many `branches` granted.

    Raises ProtocolError where it breaks the contract.
    """
    if isinstance(message, drafting_pb2.Tips):
        return tips_from_wire(message, rule, vocab_size=vocab_size)
    return (proposal_from_wire(message, rule, branches=branches, vocab_size=vocab_size),)


def proposal_from_wire(
    message: drafting_pb2.Proposal, rule: Rule, *, branches: int, vocab_size: int
) -> Proposal:
    """A proposal for a sequence under `rule`, with so many `branches` granted.

    Raises ProtocolError where it breaks the contract.
    """
    token_ids = tuple(message.token_ids)
    draft_probs = None
    if not _is_sound_chain(message, token_ids, rule, vocab_size):
        draft_probs = _check_candidates(message, token_ids, rule, branches, vocab_size)
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


def tips_from_wire(message: drafting_pb2.Tips, rule: Rule, *, vocab_size: int) -> list[Proposal]:
    """Proposals of a token each for a sequence under `rule`.

    Raises ProtocolError where they break the contract.
    """
    lengths, hashes = list(message.base_lengths), list(message.base_hashes)
    token_ids = list(message.token_ids)
    if not 0 < len(lengths) == len(hashes) == len(token_ids) <= MAX_PROPOSED:
        raise ProtocolError(
            f"tips: expected 1 to {MAX_PROPOSED} base_lengths and as many base_hashes and "
            f"token_ids, got {len(lengths)}, {len(hashes)} and {len(token_ids)}"
        )
    if FACTS[rule].needs_draft_probs:
        raise ProtocolError(
            f"tips: expected none under the rule {rule.value!r}: tell distributions"
        )
    if max(token_ids) >= vocab_size:
        raise ProtocolError(
            f"tips.token_ids: expected ids below {vocab_size}, got {max(token_ids)}"
        )
    sequence_id = message.sequence_id
    return [
        Proposal(sequence_id, length, prefix_hash, (token_id,))
        for length, prefix_hash, token_id in zip(lengths, hashes, token_ids, strict=True)
    ]


def _is_sound_chain(
    message: drafting_pb2.Proposal, token_ids: tuple[int, ...], rule: Rule, vocab_size: int
) -> bool:
    """Whether this is the usual case, of which all that `_check_candidates` asks is plainly true.

    A driver reads one for each sequence and pass, and the whole check takes ten times as long.
    """
    return (
        rule is Rule.COUPLED
        and len(token_ids) <= MAX_PROPOSED
        and not (message.parents or message.multiplicities or message.distributions)
        and max(token_ids, default=0) < vocab_size
    )


def _check_candidates(
    message: drafting_pb2.Proposal,
    token_ids: tuple[int, ...],
    rule: Rule,
    branches: int,
    vocab_size: int,
) -> DraftProbs | None:
    """Raise ProtocolError where candidates are not such as the rule and the grant allow."""
    parents = tuple(message.parents) or tuple(range(len(token_ids)))
    tree = CandidateTree(token_ids, parents, tuple(message.multiplicities))
    draft_probs = distributions_from_wire(message.distributions)
    check_proposal(rule, tree, draft_probs, vocab_size=vocab_size, max_nodes=MAX_PROPOSED)
    widest = max(len(tree.copies(node)) for node in range(len(tree) + 1))
    if widest > branches:
        raise ProtocolError(
            f"expected at most {branches} candidates a position, as granted, got {widest}: "
            "count the paths of k-SEQ, else the children of a node"
        )
    return draft_probs


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


def _stopping_state(message: drafting_pb2.Proposal) -> dict[str, float]:
    if not message.stopping_state:
        return {}
    state = dict(message.stopping_state)
    if len(state) > MAX_STOPPING_VALUES or not all(map(math.isfinite, state.values())):
        raise ProtocolError(
            f"expected at most {MAX_STOPPING_VALUES} finite numbers as the state of a stopping "
            f"rule, got {len(state)}: name only what an operator can use"
        )
    return state

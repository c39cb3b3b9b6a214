"""Converts between the messages of drafting.proto and plain values, within their size limits.

A driver reads a message on the event loop that runs its steps, so reading one message must not take
long. The limits are those of drafting.proto, ProposalBatch; a drafter keeps them, and a driver
checks them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from paceline.errors import InvalidRequestError, ProtocolError
from paceline.limits import MAX_PROPOSED
from paceline.sampling import SequenceSpec
from paceline.v1 import drafting_pb2, types_pb2
from paceline.wire.sequences import spec_from_wire, stopping_from_wire
from workers.drafting.desk import Declined, DraftingSession, SessionNews
from workers.drafting.kind import TopTokens
from workers.drafting.proposal import Proposal
from workers.drafting.tree import Grant
from workers.verification.candidates import DraftProbs, SparseProbs
from workers.verification.rule import RULES

PARTY_KEY = "paceline-party"
"""The metadata of a Draft call that names whose stream it is (drafting.proto)."""

MAX_ENTRIES = 2048
"""Maximum number of entries in a batch. A driver reads a batch of this size in less than 10 ms on
an idle core and in less than 20 ms on a busy one, even if its entries are of the slowest sort. Our
largest proposal has 1,703 entries: 129 nodes, the most that are granted, with 64 pairs each.
"""

MAX_RESPONSE_BYTES = 256 * 1024
"""Maximum size of a DraftResponse. MAX_ENTRIES entries take some 200 KiB at most. A message of 256
KiB takes at most 12 ms to parse (empty proposals take longest).
"""

_PROPOSAL_ENTRIES, _PROPOSAL_OF_DRAWS_ENTRIES = 2, 14
_DISTRIBUTION_ENTRIES, _PAIRS_AN_ENTRY = 8, 16

MAX_PAIRS = 1024
"""Maximum number of pairs for one node."""

Told = drafting_pb2.Proposal | drafting_pb2.Tips


def apply_request(
    session: DraftingSession, request: drafting_pb2.DraftRequest
) -> list[drafting_pb2.Declined]:
    """Apply one message. Returns refusals; raises ProtocolError naming the field that is wrong."""
    if not request.HasField("batch"):
        declined = _apply_one(session, request)
        return [] if declined is None else [declined_to_wire(declined)]
    if not request.batch.requests:
        raise ProtocolError("batch.requests: expected at least one")
    answers = []
    for index, one in enumerate(request.batch.requests):
        try:
            answers.append(_apply_one(session, one))
        except ProtocolError as error:
            raise ProtocolError(f"batch.requests[{index}].{error}") from None
    return [declined_to_wire(declined) for declined in answers if declined is not None]


def _apply_one(session: DraftingSession, request: drafting_pb2.DraftRequest) -> Declined | None:
    kind = request.WhichOneof("message")
    if kind == "outcome":
        outcome = request.outcome
        return session.outcome(
            outcome.sequence_id,
            outcome.position,
            list(outcome.token_ids),
            [top_tokens_from_wire(one) for one in outcome.top_tokens],
        )
    elif kind == "grant":
        session.grant(request.grant.sequence_id, _grant(request.grant))
    elif kind == "open":
        return _open(session, request.open)
    elif kind == "close":
        session.close(request.close.sequence_id)
    else:
        raise ProtocolError(
            f"message: expected open, outcome, grant or close, got {kind or 'none'}"
        )
    return None


def top_tokens_from_wire(message: types_pb2.TopTokens) -> TopTokens:
    """The likeliest tokens after one, of a message."""
    previous_id = message.previous_id if message.HasField("previous_id") else None
    return TopTokens(message.token_id, tuple(message.top_ids), previous_id)


def _grant(message: drafting_pb2.Grant) -> Grant:
    return Grant(
        until_position=message.until_position,
        branches=message.branches,
        nodes=message.nodes,
        tokens_per_ms=message.tokens_per_ms,
        step_ms_per_candidate=message.step_ms_per_candidate,
        drafting_is_free=message.drafting_is_free,
        fan_out=message.fan_out,
        share=message.share,
        shares=message.shares,
    )


def _open(session: DraftingSession, message: drafting_pb2.OpenSequence) -> Declined | None:
    try:
        spec = spec_from_wire(message.spec)
        RULES.get(spec.rule, field="rule")
    except InvalidRequestError as error:
        raise ProtocolError(f"open.spec.{error}") from error
    try:
        stopping = stopping_from_wire(message.drafting.stopping)
    except InvalidRequestError as error:
        raise ProtocolError(f"open.drafting.{error}") from error
    target_size = message.target_vocab_size or None
    known = min((one for one in (session.vocab_size, target_size) if one), default=None)
    return session.open(
        message.sequence_id,
        spec if known is None else _within(spec, known),
        list(message.token_ids),
        vocab_size=target_size,
        stopping=stopping,
        tenant=message.tenant,
    )


def _within(spec: SequenceSpec, vocab_size: int) -> SequenceSpec:
    """The spec without biases, end tokens and ends of bad words at or above `vocab_size`.

    The drafter never draws these ids, so a bias on them changes nothing and they cannot end a
    draft.
    """
    biases, end_token_ids = spec.sampling.logit_bias, spec.end_token_ids
    last = [word[-1] for word in spec.bad_words]
    if max((*biases, *end_token_ids, *last), default=0) < vocab_size:
        return spec
    kept = {token_id: bias for token_id, bias in biases.items() if token_id < vocab_size}
    return replace(
        spec,
        sampling=replace(spec.sampling, logit_bias=kept),
        end_token_ids=tuple(one for one in end_token_ids if one < vocab_size),
        bad_words=tuple(word for word in spec.bad_words if word[-1] < vocab_size),
    )


def declined_to_wire(declined: Declined) -> drafting_pb2.Declined:
    return drafting_pb2.Declined(
        sequence_id=declined.sequence_id, reason=declined.reason, for_good=declined.for_good
    )


def to_responses(
    news: SessionNews, pass_seconds: float, *, overrun_seconds: float = 0.0, shares: int = 0
) -> list[drafting_pb2.DraftResponse]:
    """A pass's messages for one stream: one batch or several, then the refusals."""
    tips, others = _split(news.proposals)
    told = [_proposal(proposal) for proposal in others]
    columns = [
        _tips(tips[start : start + MAX_PROPOSED]) for start in range(0, len(tips), MAX_PROPOSED)
    ]
    batches = [
        drafting_pb2.ProposalBatch(
            proposals=[one for one in part if isinstance(one, drafting_pb2.Proposal)],
            tips=[one for one in part if isinstance(one, drafting_pb2.Tips)],
        )
        for part in in_batches([*told, *columns])
    ]
    batches[0].pass_seconds = pass_seconds
    batches[0].tokens_fed = news.tokens_fed
    batches[0].overrun_seconds = overrun_seconds
    batches[0].shares = shares
    answers = [drafting_pb2.DraftResponse(proposals=batch) for batch in batches]
    return answers + [
        drafting_pb2.DraftResponse(declined=declined_to_wire(declined))
        for declined in news.declined
    ]


def _split(proposals: Sequence[Proposal]) -> tuple[Sequence[Proposal], Sequence[Proposal]]:
    """The proposals that can be sent in columns (Tips), and the others."""
    tips, others = [], []
    for one in proposals:
        if len(one.token_ids) > 1 or one.stopping_state or not _is_bare(one):
            others.append(one)
        else:
            tips.append(one)
    return (tips, others) if len(tips) > 1 else ((), proposals)


def _is_bare(proposal: Proposal) -> bool:
    """Whether a proposal has tokens and no other content."""
    return bool(proposal.token_ids) and not (
        proposal.parents or proposal.multiplicities or proposal.distributions
    )


def _tips(proposals: Sequence[Proposal]) -> drafting_pb2.Tips:
    sequence_ids = [one.sequence_id for one in proposals]
    are_of_one = sequence_ids.count(sequence_ids[0]) == len(sequence_ids)
    return drafting_pb2.Tips(
        sequence_id=sequence_ids[0] if are_of_one else 0,
        sequence_ids=() if are_of_one else sequence_ids,
        base_lengths=[one.base_length for one in proposals],
        base_hashes=[one.base_hash for one in proposals],
        token_ids=[one.token_ids[0] for one in proposals],
        last_of=[one.sequence_id for one in proposals if one.last],
    )


def _proposal(proposal: Proposal) -> drafting_pb2.Proposal:
    message = drafting_pb2.Proposal(
        sequence_id=proposal.sequence_id,
        base=types_pb2.Base(length=proposal.base_length, hash=proposal.base_hash),
        token_ids=proposal.token_ids,
    )
    # Most proposals have none of these fields, and setting one takes time even if it is empty.
    if proposal.last:
        message.last = True
    if proposal.parents:
        message.parents.extend(proposal.parents)
    if proposal.multiplicities:
        message.multiplicities.extend(proposal.multiplicities)
    if proposal.distributions:
        message.distributions.extend(distributions_to_wire(proposal.distributions))
    if proposal.stopping_state:
        message.stopping_state.update(proposal.stopping_state)
    return message


def num_entries(told: Told) -> int:
    """The size of a proposal or of tips in entries, as drafting.proto defines them."""
    if isinstance(told, drafting_pb2.Tips):
        columns = (told.token_ids, told.base_lengths, told.base_hashes, told.sequence_ids)
        return max(1, len(told.last_of), *map(len, columns))
    entries = _PROPOSAL_OF_DRAWS_ENTRIES if told.distributions else _PROPOSAL_ENTRIES
    entries += max(len(told.token_ids), len(told.parents), len(told.multiplicities))
    entries += len(told.stopping_state)
    for one in told.distributions:
        pairs = max(len(one.token_ids), len(one.probabilities))
        entries += _DISTRIBUTION_ENTRIES + pairs // _PAIRS_AN_ENTRY
    return entries


def count_entries(batch: drafting_pb2.ProposalBatch) -> int:
    """The number of entries in a batch. Counting stops once the number exceeds MAX_ENTRIES."""
    entries = len(batch.proposals) + len(batch.tips)
    if entries > MAX_ENTRIES:
        return entries
    entries = 0
    told: list[Told] = [*batch.proposals, *batch.tips]
    for one in told:
        entries += num_entries(one)
        if entries > MAX_ENTRIES:
            break
    return entries


def in_batches(told: Iterable[Told]) -> list[list[Told]]:
    """Split proposals and tips, in order, into lists that each fit into a batch; at least one."""
    batches: list[list[Told]] = [[]]
    room = MAX_ENTRIES
    for one in told:
        entries = num_entries(one)
        if entries > room:
            batches.append([])
            room = MAX_ENTRIES
        batches[-1].append(one)
        room -= entries
    return batches


def distributions_to_wire(
    of_node: Mapping[int, SparseProbs],
) -> list[types_pb2.DraftDistribution]:
    """One message per node, in ascending order of nodes."""
    return [
        types_pb2.DraftDistribution(
            node=node,
            token_ids=pairs.token_ids_M.tolist(),
            probabilities=pairs.probs_M.tolist(),
        )
        for node, pairs in sorted(of_node.items())
    ]


def distributions_from_wire(
    messages: Iterable[types_pb2.DraftDistribution],
) -> DraftProbs | None:
    """The pairs of each node, or None if there are no messages.

    Raises ProtocolError if a node comes twice or has too many pairs. Whether the pairs are
    probabilities is checked together with the candidates (candidates.check_proposal).
    """
    of_node: dict[int, SparseProbs] = {}
    for message in messages:
        node = message.node
        if node in of_node:
            raise ProtocolError(f"expected one distribution per node, got two for node {node}")
        count = len(message.token_ids)
        if count > MAX_PAIRS or len(message.probabilities) != count:
            raise ProtocolError(
                f"expected at most {MAX_PAIRS} pairs under node {node}, got {count} token ids and "
                f"{len(message.probabilities)} probabilities"
            )
        of_node[node] = SparseProbs(
            np.array(message.token_ids, dtype=np.int64),
            np.array(message.probabilities, dtype=np.float32),
        )
    return DraftProbs(of_node) if of_node else None

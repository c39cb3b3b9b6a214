"""Reads and checks the proposals in a drafter's messages (drafting.proto)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from cluster.decoding.drafters import MALFORMED_LIMIT
from cluster.decoding.events import Proposal
from cluster.driver.requests import Speculation, widest_proposal
from paceline.errors import ProtocolError
from paceline.rules import MAX_PROPOSED
from paceline.v1 import drafting_pb2
from workers.drafting.draft_probs_wire import distributions_from_wire
from workers.verification.candidates import CandidateTree, DraftProbs, check_proposal
from workers.verification.rule import rule_named

MAX_STOPPING_VALUES = 16
"""Most numbers in the state of a stopping rule. Our rules report four."""

MAX_STOPPING_NAME = 64
"""Most characters in the name of such a number. The name is kept and reported with the request."""

_log = logging.getLogger(__name__)

SpeculationOf = Callable[[int], Speculation | None]
"""How a sequence is decoded, by its id; None: it has ended or never existed."""


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

"""A drafter's proposal, as its desk makes it and the driver's scheduler reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from workers.verification.candidates import SparseProbs


@dataclass(slots=True)
class Proposal:
    """Candidates after the first `base_length` tokens: a chain, or a tree if it has `parents`.

    The fields are those of drafting.proto, Proposal. The driver makes a Proposal only of a message
    that keeps that contract, and a MalformedProposal of any other.
    """

    sequence_id: int
    base_length: int
    base_hash: int
    token_ids: tuple[int, ...]
    last: bool = False
    parents: tuple[int, ...] = ()
    multiplicities: tuple[int, ...] = ()
    distributions: Mapping[int, SparseProbs] = field(default_factory=dict)
    stopping_state: Mapping[str, float] = field(default_factory=dict)

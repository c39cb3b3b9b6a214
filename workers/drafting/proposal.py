"""What a drafter proposes: the same value at its desk and in the driver's scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from workers.verification.draft_probs import SparseProbs


@dataclass(slots=True)
class Proposal:
    """Candidates under the first `base_length` tokens: a chain, or a tree where it has parents.

    Fields are those of drafting.proto, Proposal. The driver checks that they keep that contract
    before it makes one: what breaks it is a MalformedProposal.
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

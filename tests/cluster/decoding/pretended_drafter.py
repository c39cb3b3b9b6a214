"""A drafter that keeps sequences as a real one does and makes up tokens, for tests without I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import numpy as np

from cluster.decoding.events import Proposal
from cluster.decoding.instructions import (
    CloseDraft,
    DraftInstruction,
    OpenDraft,
    SendGrant,
    SendOutcome,
)
from paceline.prefix_hash import hash_prefix
from tests.cluster.decoding.true_text import END_TOKEN
from workers.verification.candidates import SparseProbs
from workers.verification.rule import rule_named


@dataclass
class DraftedSequence:
    """A drafter's sequence: committed tokens, and for each candidate the tokens that lead to it."""

    committed: list[int]
    seed: int
    candidates: list[tuple[int, ...]] = field(default_factory=list)
    until_position: int = 0
    nodes: int = 0
    branches: int = 1
    rule: str = "coupled"
    paths: dict[tuple[int, ...], int] = field(default_factory=dict)
    """The number of k-SEQ's paths through each candidate, by the tokens that lead to it."""


@dataclass
class PretendedDrafter:
    """Keeps sequences as a real drafter does. `guess` makes tokens; `pick` chooses what grows."""

    guess: Callable[[list[int], int], int]
    pick: Callable[[int], int] = lambda count: count - 1
    sequences: dict[int, DraftedSequence] = field(default_factory=dict)

    def tell(self, message: DraftInstruction) -> None:
        """Handle a message of the driver."""
        match message:
            case OpenDraft(_, sequence_id, spec, token_ids):
                drafted = DraftedSequence(list(token_ids), spec.seed, rule=spec.rule)
                self.sequences[sequence_id] = drafted
            case SendOutcome(_, sequence_id, position, token_ids):
                drafted = self.sequences[sequence_id]
                assert position == len(drafted.committed)
                drafted.committed.extend(token_ids)
                count = len(token_ids)
                drafted.paths = {path[count:]: n for path, n in drafted.paths.items()}
                drafted.candidates = [
                    c[count:]
                    for c in drafted.candidates
                    if len(c) > count and c[:count] == token_ids
                ]
            case SendGrant(_, sequence_id, grant):
                drafted = self.sequences[sequence_id]
                drafted.until_position, drafted.nodes = grant.until_position, grant.nodes
                # Where branches are wanted, some nodes get a second child.
                drafted.branches = max(grant.branches, 2 if grant.fan_out else 1)
            case CloseDraft(_, sequence_id):
                del self.sequences[sequence_id]

    def run_pass(self) -> tuple[Proposal, ...]:
        """Add one node, or the children of one, to each sequence whose grant allows it."""
        return tuple(
            proposal
            for sequence_id, drafted in self.sequences.items()
            if (proposal := self._grow(sequence_id, drafted)) is not None
        )

    def _grow(self, sequence_id: int, drafted: DraftedSequence) -> Proposal | None:
        inner = {c[:-1] for c in drafted.candidates}
        leaves = [c for c in ((), *drafted.candidates) if c not in inner and c[-1:] != (END_TOKEN,)]
        room = drafted.nodes - len(drafted.candidates)
        if room <= 0 or not leaves:
            return None
        leaf = leaves[self.pick(len(leaves)) if drafted.branches > 1 else -1]
        path = [*drafted.committed, *leaf]
        if len(path) >= drafted.until_position:
            return None
        count = min(drafted.branches, room)
        if drafted.rule == "kseq" and leaf:
            count = min(drafted.paths[leaf], room)
        made = Counter(self.guess(path, drafted.seed) for _ in range(count))
        drafted.candidates.extend((*leaf, token_id) for token_id in made)
        proposal = Proposal(
            sequence_id,
            len(path),
            hash_prefix(path),
            tuple(made),
            last=set(made) == {END_TOKEN},
            parents=(0,) * len(made),
        )
        if drafted.rule == "kseq":
            drafted.paths |= {(*leaf, token_id): number for token_id, number in made.items()}
            proposal = replace(proposal, multiplicities=tuple(made.values()))
        if rule_named(drafted.rule).needs_draft_probs:
            proposal = replace(proposal, distributions={0: evenly({*made, len(path) % 50})})
        return proposal


def evenly(token_ids: Collection[int]) -> SparseProbs:
    """A distribution in which these tokens are equally likely."""
    size = len(token_ids)
    probs_M = np.full(size, 1 / size, dtype=np.float32)
    return SparseProbs(np.array(sorted(token_ids), dtype=np.int64), probs_M)

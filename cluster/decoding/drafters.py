"""Which drafter works for which sequence, and what it is told."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from cluster.decoding.events import DrafterJoined, TopTokens
from cluster.decoding.instructions import (
    CloseDraft,
    Grant,
    Instruction,
    OpenDraft,
    SendOutcome,
    Suspect,
)
from cluster.decoding.sequence import Sequence
from cluster.decoding.step_costs import StepCosts
from paceline.rules import Rule, Stopping

_SLOW_CHANGE = 0.9
"""Of the duration of a pass, so much is remembered from one to the next."""

MALFORMED_LIMIT = 3
"""So many malformed proposals make a drafter suspect."""


@dataclass(slots=True)
class _Drafter:
    joined: DrafterJoined
    load: int = 0
    pass_ms: float = 0.0
    malformed: int = 0

    def fits(self, sequence: Sequence) -> bool:
        """Whether it can draft for this sequence at all."""
        request, own = sequence.request, self.joined
        return (
            sequence.tree.num_committed < own.max_position
            and request.spec.rule in own.rules
            and request.drafter_kind in (None, own.kind)
            and own.drafter not in sequence.declined_by
        )


class Drafters:
    """The drafters that can be used now. Methods append their instructions to `out`."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._drafters: dict[str, _Drafter] = {}

    def join(self, joined: DrafterJoined) -> None:
        """A drafter can be used; it knows no sequence."""
        assert joined.drafter not in self._drafters, f"{joined.drafter} joined twice"
        self._drafters[joined.drafter] = _Drafter(joined)

    def lose(self, drafter: str, sequences: Iterable[Sequence]) -> None:
        """A drafter is gone, and what it knew with it. Losing it twice is no error."""
        self._drafters.pop(drafter, None)
        for sequence in sequences:
            sequence.declined_by.discard(drafter)
            if sequence.drafter == drafter:
                _forget(sequence)

    @property
    def names(self) -> Collection[str]:
        """Those that can be used."""
        return self._drafters.keys()

    def drafted(self, drafter: str, pass_seconds: float) -> None:
        """A pass of the drafter that gave candidates took so long."""
        known = self._drafters.get(drafter)
        if known is not None and pass_seconds > 0:
            kept = _SLOW_CHANGE if known.pass_ms else 0.0
            known.pass_ms = kept * known.pass_ms + (1 - kept) * 1000 * pass_seconds

    def known(self, drafter: str) -> bool:
        """Whether it can be used."""
        return drafter in self._drafters

    def blame(self, drafter: str, sequences: Iterable[Sequence], out: list[Instruction]) -> None:
        """It sent a malformed proposal; after three it is used no more."""
        blamed = self._drafters.get(drafter)
        if blamed is None:
            return
        blamed.malformed += 1
        if blamed.malformed >= MALFORMED_LIMIT:
            self.lose(drafter, sequences)
            out.append(Suspect(drafter))

    def assign(self, sequence: Sequence, out: list[Instruction]) -> None:
        """Give the sequence a drafter that fits, if it wants one: a model, the least loaded."""
        if sequence.drafter is not None or not sequence.policy.drafts:
            return
        able = [one for one in self._drafters.values() if one.fits(sequence)]
        if not able:
            return
        chosen = min(
            able, key=lambda one: (one.joined.kind != "model", one.load, one.joined.drafter)
        )
        chosen.load += 1
        sequence.drafter = chosen.joined.drafter
        sequence.draft_limit = chosen.joined.max_position
        sequence.wants_top_tokens = chosen.joined.wants_top_tokens
        request = sequence.request
        if request.spec.rule is not Rule.COUPLED:
            # Candidates of two drafters, or of two draws, must not stand side by side.
            sequence.tree.drop_run_ahead()
        out.append(
            OpenDraft(
                sequence.drafter,
                sequence.sequence_id,
                request.spec,
                tuple(sequence.tree.token_ids),
                request.stopping,
                request.tenant,
            )
        )
        self.grant(sequence, out)

    def grant(self, sequence: Sequence, out: list[Instruction]) -> None:
        """Tell its drafter how far it may draft, where that has changed."""
        if sequence.drafter is None:
            return
        request = sequence.request
        pass_ms = self._drafters[sequence.drafter].pass_ms
        sequence.pace = self._costs.step_ms / pass_ms if pass_ms else 0.0
        nodes = sequence.policy.granted_candidates(sequence.draft_view())
        depth = min(nodes // (sequence.num_paths or 1), sequence.useful_candidates)
        until = sequence.tree.num_committed + depth
        by_cost = request.stopping is Stopping.COST
        if (until, nodes) == (sequence.granted_until, sequence.granted_nodes) and not by_cost:
            return
        sequence.granted_until, sequence.granted_nodes = until, nodes
        out.append(
            Grant(
                sequence.drafter,
                sequence.sequence_id,
                until,
                branches=request.branches,
                nodes=nodes,
                tokens_per_ms=self._costs.tokens_per_ms if by_cost else 0.0,
                step_ms_per_candidate=self._costs.ms_per_candidate if by_cost else 0.0,
                drafting_is_free=sequence.policy.drafting_is_free,
            )
        )

    def outcome(
        self,
        sequence: Sequence,
        position: int,
        token_ids: tuple[int, ...],
        top_tokens: tuple[TopTokens, ...],
        out: list[Instruction],
    ) -> None:
        """Tell its drafter what was committed, and how far it may go now."""
        if sequence.drafter is None:
            return
        out.append(
            SendOutcome(sequence.drafter, sequence.sequence_id, position, token_ids, top_tokens)
        )
        self.grant(sequence, out)

    def decline(self, drafter: str, sequence: Sequence, out: list[Instruction]) -> None:
        """A drafter will not work for the sequence; another may."""
        sequence.declined_by.add(drafter)
        if sequence.drafter == drafter:
            self._drafters[drafter].load -= 1
            _forget(sequence)
            self.assign(sequence, out)

    def release(self, sequence: Sequence, out: list[Instruction]) -> None:
        """The sequence ended."""
        if sequence.drafter is not None:
            out.append(CloseDraft(sequence.drafter, sequence.sequence_id))
            self._drafters[sequence.drafter].load -= 1
            _forget(sequence)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Assert that loads count the sequences that they should."""
        counted = dict.fromkeys(self._drafters, 0)
        for sequence in sequences:
            if sequence.drafter is not None:
                counted[sequence.drafter] += 1
        assert counted == {name: one.load for name, one in self._drafters.items()}


def _forget(sequence: Sequence) -> None:
    sequence.drafter = None
    sequence.draft_limit = 0
    sequence.wants_top_tokens = False
    sequence.granted_until = 0
    sequence.granted_nodes = 0
    sequence.pace = 0.0
    sequence.draft_exhausted = False

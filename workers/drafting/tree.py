"""One sequence at a drafter: what may be drafted for it now, and what its driver was told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.errors import ProtocolError
from paceline.rules import Stopping
from paceline.sampling import SequenceSpec
from workers.drafting.nodes import ROOT, Kept, NewNodes, NodeTree
from workers.verification.rule import rule_named


@dataclass(slots=True)
class Grant:
    """Leave to draft (drafting.proto, Grant)."""

    until_position: int = 0
    branches: int = 1
    nodes: int = 0
    tokens_per_ms: float = 0.0
    step_ms_per_candidate: float = 0.0
    drafting_is_free: bool = False
    fan_out: int = 0
    share: int = 0
    shares: int = 0


class DraftTree(NodeTree):
    """The nodes of a sequence, within its spec and its grant.

    `max_position`: no token is drafted at or beyond it. `vocab_size`: no token id at or above it is
    drafted; None: unbounded. `tenant`: requests of one tenant may share what is learned.
    """

    def __init__(
        self,
        spec: SequenceSpec,
        token_ids: Sequence[int],
        *,
        max_position: int,
        vocab_size: int | None = None,
        stopping: Stopping = Stopping.FIXED,
        tenant: str = "",
    ) -> None:
        super().__init__(token_ids, prompt_length=spec.prompt_length)
        self.spec = spec
        self.vocab_size = vocab_size
        self.stopping = stopping
        self.tenant = tenant
        self.max_position = max_position
        self.needs_draft_probs = rule_named(spec.rule).needs_draft_probs
        # Cached, since it is asked for several times per pass; None after a change.
        self._is_ready: bool | None = None
        self._take_grant(Grant())
        self._told_last = self._told_until_grant = False

    def ends(self, node: int) -> bool:
        """Whether nothing can follow a node: it ends the sequence, or the context is full."""
        length = len(self.committed) + self._depths[node]
        if length >= self.max_position:
            return True
        end_token_ids = self.spec.end_token_ids
        return (
            bool(end_token_ids)
            and length > self.spec.prompt_length
            and self.tokens[node] in end_token_ids
        )

    def room(self, node: int) -> int:
        """The number of tokens that may follow a node, one after another, by position alone."""
        left = self._deepest - self._depths[node]
        if left <= 0 or (self.spec.end_token_ids and self.ends(node)):
            return 0
        return left

    def with_room(self, nodes: Iterable[int]) -> list[int]:
        """Those of `nodes` that a token may follow."""
        if self.spec.end_token_ids:
            return [node for node in nodes if self.room(node) > 0]
        deepest, depths = self._deepest, self._depths
        return [node for node in nodes if depths[node] < deepest]

    @property
    def nodes_left(self) -> int:
        """The number of further nodes that the grant allows."""
        left = self._most_nodes - len(self.tokens) + 1
        return left if left > 0 else 0

    @property
    def chain_room(self) -> int:
        """The number of tokens that may follow the end of a chain."""
        room, left = self.room(len(self.tokens) - 1), self.nodes_left
        return room if room < left else left

    @property
    def ready(self) -> bool:
        """Whether a pass should look for more to draft."""
        is_ready = self._is_ready
        if is_ready is None:
            is_ready = self.is_settled and not self._told_last
            is_ready = is_ready and len(self.tokens) <= self._most_nodes
            if is_ready:
                is_ready = self.room(self.end if self.may_go_on_as_chain else ROOT) > 0
            self._is_ready = is_ready
        return is_ready

    @property
    def may_go_on_as_chain(self) -> bool:
        """Whether it is a chain, and the grant is for one candidate per position."""
        return self._grows_as_chain and self.is_chain

    @property
    def used_up(self) -> bool:
        """Whether the grant's nodes are used up. Never for a chain granted by position only."""
        if len(self.tokens) <= self._most_nodes:
            return False
        return self.grant.nodes > 0 or not self.is_chain

    @property
    def finished(self) -> bool:
        """Whether nothing can follow, whatever is granted, as far as the tree itself shows."""
        ends_as_chain = self.grant.fan_out == 0 and self.is_chain
        if not self.spec.end_token_ids:  # by its length alone
            return len(self.committed) + self._depths[-1 if ends_as_chain else ROOT] >= (
                self.max_position
            )
        return self.ends(ROOT) or (ends_as_chain and self.ends(self.end))

    @property
    def wants_last(self) -> bool:
        """Whether the driver waits for nodes that cannot come, and has not been told so."""
        if self._told_last or not self.is_settled:
            return False
        reached = self.num_committed + (self._depths[-1] if self.is_chain else 0)
        if self.grant.until_position <= reached:
            return False
        return self.used_up or self.finished

    def settle(self, count: int) -> None:
        """Process the next `count` committed tokens, or as many as there are."""
        super().settle(count)
        self._is_ready = None

    def set_grant(self, grant: Grant) -> None:
        """Replace the grant. If it allows more, what was told of the old one's end is void."""
        before = self.grant
        self._take_grant(grant)
        if self._told_until_grant and (
            grant.until_position > before.until_position
            or grant.branches > before.branches
            or grant.fan_out > before.fan_out
            or grant.nodes > before.nodes
            or (grant.nodes == 0 and before.nodes > 0)
        ):
            self._told_last = self._told_until_grant = False

    def tell_last(self, *, until_grant: bool) -> None:
        """Note that the driver is told that nothing more comes before the next outcome.

        `until_grant`: a larger grant can change that.
        """
        self._told_last, self._told_until_grant = True, until_grant
        self._is_ready = None

    def extend(self, new: NewNodes) -> None:
        """Add drafted nodes. The grant must allow them, and none may follow an end token."""
        if not new.token_ids:
            return
        first, depths = len(self.tokens), self._depths
        super().extend(new)
        self._is_ready = None
        assert len(self.tokens) <= 1 + self._most_nodes, "drafted more nodes than granted"
        deepest = depths[-1] if first == len(depths) - 1 else max(depths[first:])
        assert deepest <= self._deepest, "drafted beyond the grant"
        if self.spec.end_token_ids:
            assert not any(map(self.ends, self.parents[first:])), "drafted beyond an end"

    def outcome(self, position: int, token_ids: Sequence[int]) -> Kept:
        """Commit tokens. The driver knows nothing yet of what follows them.

        Raises ProtocolError if `position` is not the number of tokens that are committed.
        """
        if position != self.num_committed:
            raise ProtocolError(
                f"outcome.position: expected {self.num_committed}, the number of committed tokens, "
                f"got {position}"
            )
        self._told_last = self._told_until_grant = False
        kept = self.commit(token_ids)
        self._take_grant(self.grant)
        return kept

    def _take_grant(self, grant: Grant) -> None:
        """Apply a grant: compute the largest depth and number of nodes that it allows."""
        self.grant = grant
        self._grows_as_chain = grant.branches == 1 and grant.fan_out == 0
        committed = len(self.committed)
        self._deepest = min(grant.until_position, self.max_position) - committed
        self._most_nodes = grant.nodes or grant.until_position - committed
        self._is_ready = None

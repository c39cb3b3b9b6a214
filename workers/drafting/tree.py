"""One sequence at a drafter: what may be drafted for it now, and what its driver was told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import ProtocolError
from paceline.rules import Stopping
from paceline.sampling import SequenceSpec
from workers.drafting.nodes import ROOT, Kept, NewNodes, NodeTree


@dataclass(frozen=True, slots=True)
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

    `max_position`: no token is drafted at or beyond it. `tenant`: whose requests may share what
    is learned.
    """

    def __init__(
        self,
        spec: SequenceSpec,
        token_ids: Sequence[int],
        *,
        max_position: int,
        stopping: Stopping = Stopping.FIXED,
        tenant: str = "",
    ) -> None:
        super().__init__(token_ids)
        self.spec = spec
        self.stopping = stopping
        self.tenant = tenant
        self.max_position = max_position
        self.grant = Grant()
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
        """How many tokens may follow a node, one after another, by position alone."""
        length = len(self.committed) + self._depths[node]
        left = min(self.grant.until_position, self.max_position) - length
        return left if left > 0 and not self.ends(node) else 0

    @property
    def nodes_left(self) -> int:
        """How many more nodes the grant allows."""
        most = self.grant.nodes or self.grant.until_position - len(self.committed)
        left = most - len(self.tokens) + 1
        return left if left > 0 else 0

    @property
    def chain_room(self) -> int:
        """How many tokens may follow the end of a chain."""
        return min(self.room(self.end), self.nodes_left)

    @property
    def ready(self) -> bool:
        """Whether a pass should look for more to draft."""
        if self._told_last or self.nodes_left == 0:
            return False
        if self.is_chain and self.grows_as_chain:
            return self.room(self.end) > 0
        return self.room(ROOT) > 0

    @property
    def grows_as_chain(self) -> bool:
        """Whether the grant is for one candidate a position."""
        return self.grant.branches == 1 and self.grant.fan_out == 0

    @property
    def used_up(self) -> bool:
        """Whether the grant's nodes are used up. Of a chain granted by position alone, never."""
        return self.nodes_left == 0 and (self.grant.nodes > 0 or not self.is_chain)

    @property
    def finished(self) -> bool:
        """Whether nothing can follow, whatever is granted, as far as that is plain to see."""
        if self.ends(ROOT):
            return True
        return self.is_chain and self.grant.fan_out == 0 and self.ends(self.end)

    @property
    def wants_last(self) -> bool:
        """Whether the driver waits for nodes that cannot come, and has not been told so."""
        if self._told_last:
            return False
        reached = self.num_committed + (self._depths[-1] if self.is_chain else 0)
        if self.grant.until_position <= reached:
            return False
        return self.used_up or self.finished

    def set_grant(self, grant: Grant) -> None:
        """Replace the grant. One that allows more takes back that the former was used up."""
        before, self.grant = self.grant, grant
        if self._told_until_grant and (
            grant.until_position > before.until_position
            or grant.branches > before.branches
            or grant.fan_out > before.fan_out
            or grant.nodes > before.nodes
            or (grant.nodes == 0 and before.nodes > 0)
        ):
            self._told_last = self._told_until_grant = False

    def tell_last(self, *, until_grant: bool) -> None:
        """Note that the driver is told: nothing more before the next outcome.

        `until_grant`: unless a larger grant comes before it.
        """
        self._told_last, self._told_until_grant = True, until_grant

    def extend(self, new: NewNodes) -> None:
        """Add drafted nodes. The grant must allow them, and none may follow an end token."""
        if not new.token_ids:
            return
        assert len(new.token_ids) <= self.nodes_left, "drafted more nodes than granted"
        first = self.end + 1
        super().extend(new)
        for node in range(first, self.end + 1):
            assert self.room(self.parents[node]) > 0, "drafted beyond the grant or an end"

    def outcome(self, position: int, token_ids: Sequence[int]) -> Kept:
        """Commit tokens; the driver knows nothing of what follows them yet.

        Raises ProtocolError when `position` is not the number of tokens committed so far.
        """
        if position != self.num_committed:
            raise ProtocolError(
                f"outcome.position: expected {self.num_committed}, the number of committed tokens, "
                f"got {position}"
            )
        self._told_last = self._told_until_grant = False
        return self.commit(token_ids)

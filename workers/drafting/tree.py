"""One sequence at a drafter: its committed tokens, the tree drafted after them, and its grant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.errors import ProtocolError
from paceline.prefix_hash import EMPTY_PREFIX_HASH, extend_hash, hash_prefix
from paceline.rules import Stopping
from paceline.sampling import SequenceSpec
from workers.verification.draft_probs import SparseProbs

ROOT = 0
"""The number of the last committed token among the nodes; the drafted ones follow from 1 on."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Leave to draft (drafting.proto, Grant)."""

    until_position: int = 0
    branches: int = 1
    nodes: int = 0
    tokens_per_ms: float = 0.0
    step_ms_per_candidate: float = 0.0
    drafting_is_free: bool = False


@dataclass(frozen=True, slots=True)
class NewNodes:
    """Nodes that a pass adds to a tree, numbered on from its `num_nodes` + 1.

    `parents` are numbers in the whole tree, those of new nodes included; None: a chain that
    continues `tree.end`. `distributions`: what the children of a node were drawn from, by the
    node's number, for rules that need it. `multiplicities` as in drafting.proto.
    """

    token_ids: Sequence[int] = ()
    parents: Sequence[int] | None = None
    distributions: Mapping[int, SparseProbs] = field(default_factory=dict)
    multiplicities: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Kept:
    """What an outcome (its `token_ids`) left of a tree, in the numbers from before it.

    `path`: the nodes that were committed, in order. `nodes`: those that stayed; nodes[i] is now
    node i + 1. `agreed`: all committed tokens were nodes, so the last of `path` is the root now.
    """

    token_ids: tuple[int, ...]
    path: tuple[int, ...]
    nodes: tuple[int, ...]
    agreed: bool


class DraftTree:
    """Committed tokens and the nodes drafted after them; a chain is a tree without forks.

    Node 0 is the last committed token. Parents have smaller numbers than their children.
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
        self.spec = spec
        self.stopping = stopping
        self.tenant = tenant
        self.max_position = max_position
        self.committed = list(token_ids)
        self.grant = Grant()
        self.distributions: dict[int, SparseProbs] = {}
        self._told_last = self._told_until_grant = False
        # By node number, the root's entry first.
        self.tokens = [self.committed[-1]]
        self.parents = [ROOT]
        self.multiplicities = [1]
        self._depths = [0]
        self._hashes = [hash_prefix(self.committed)]
        self._children: list[list[int]] = [[]]

    @property
    def num_committed(self) -> int:
        """Committed tokens, prompt included."""
        return len(self.committed)

    @property
    def num_nodes(self) -> int:
        """Drafted nodes."""
        return len(self.tokens) - 1

    @property
    def end(self) -> int:
        """The newest node: of a chain, its end."""
        return len(self.tokens) - 1

    @property
    def is_chain(self) -> bool:
        """Whether each node continues the one before."""
        return self._depths[-1] == self.num_nodes

    def depth(self, node: int) -> int:
        """How many nodes lead to this one, itself included."""
        return self._depths[node]

    def children(self, node: int) -> Sequence[int]:
        """The children of a node in the order in which they were drawn."""
        return self._children[node]

    def child_with(self, node: int, token_id: int) -> int | None:
        """The first child of a node that is this token."""
        return next(
            (child for child in self._children[node] if self.tokens[child] == token_id), None
        )

    def path_to(self, node: int) -> list[int]:
        """The nodes from a child of the root to this one."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def prefix(self, node: int) -> list[int]:
        """All token ids up to and including a node."""
        return self.committed + [self.tokens[step] for step in self.path_to(node)]

    def base(self, node: int) -> tuple[int, int]:
        """The length and hash of the prefix that ends with a node."""
        return self.num_committed + self._depths[node], self._hashes[node]

    def ends(self, node: int) -> bool:
        """Whether nothing can follow a node: it ends the sequence, or the context is full."""
        length = self.num_committed + self._depths[node]
        if length >= self.max_position:
            return True
        return length > self.spec.prompt_length and self.tokens[node] in self.spec.end_token_ids

    def room(self, node: int) -> int:
        """How many tokens may follow a node, one after another, by position alone."""
        if self.ends(node):
            return 0
        length = self.num_committed + self._depths[node]
        return max(0, min(self.grant.until_position, self.max_position) - length)

    @property
    def nodes_left(self) -> int:
        """How many more nodes the grant allows."""
        most = self.grant.nodes or self.grant.until_position - self.num_committed
        return max(0, most - self.num_nodes)

    @property
    def chain_room(self) -> int:
        """How many tokens may follow the end of a chain."""
        return min(self.room(self.end), self.nodes_left)

    @property
    def ready(self) -> bool:
        """Whether a pass should look for more to draft."""
        if self._told_last or self.nodes_left == 0:
            return False
        if self.is_chain and self.grant.branches == 1:
            return self.room(self.end) > 0
        return self.room(ROOT) > 0

    @property
    def used_up(self) -> bool:
        """Whether the grant's nodes are used up. Of a chain granted by position alone, never."""
        return self.nodes_left == 0 and (self.grant.nodes > 0 or not self.is_chain)

    @property
    def finished(self) -> bool:
        """Whether nothing can follow, whatever is granted, as far as that is plain to see."""
        return self.ends(ROOT) or (self.is_chain and self.ends(self.end))

    @property
    def wants_last(self) -> bool:
        """Whether the driver waits for nodes that cannot come, and has not been told so."""
        reached = self.num_committed + (self._depths[-1] if self.is_chain else 0)
        if self._told_last or self.grant.until_position <= reached:
            return False
        return self.used_up or self.finished

    def set_grant(self, grant: Grant) -> None:
        """Replace the grant. One that allows more takes back that the former was used up."""
        before, self.grant = self.grant, grant
        if self._told_until_grant and (
            grant.until_position > before.until_position
            or grant.branches > before.branches
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
        assert len(new.token_ids) <= self.nodes_left, "drafted more nodes than granted"
        first = self.end + 1
        for index, token_id in enumerate(new.token_ids):
            parent = new.parents[index] if new.parents is not None else first + index - 1
            assert 0 <= parent < first + index, "a child before its parent"
            assert self.room(parent) > 0, "drafted beyond the grant or an end"
            self._children[parent].append(first + index)
            self._children.append([])
            self.tokens.append(token_id)
            self.parents.append(parent)
            self.multiplicities.append(new.multiplicities[index] if new.multiplicities else 1)
            self._depths.append(self._depths[parent] + 1)
            self._hashes.append(extend_hash(self._hashes[parent], token_id))
        self.distributions.update(new.distributions)

    def unknown_part(self, token_ids: Sequence[int], parents: Sequence[int]) -> NewNodes:
        """Of a tree under the root (parents as on the wire), what is not yet drafted.

        Cut to what the grant allows: nodes beyond it or under an end are left out with all that
        follows them. For drafters that draft by no draw, and propose a whole tree every time.
        """
        number_of = {ROOT: ROOT}
        new_tokens: list[int] = []
        new_parents: list[int] = []
        room = {ROOT: self.room(ROOT)}
        for index, (token_id, parent) in enumerate(zip(token_ids, parents, strict=True)):
            under = number_of.get(parent)
            if under is None:
                continue
            known = self.child_with(under, token_id) if under <= self.end else None
            if known is None:
                if room[under] == 0 or len(new_tokens) == self.nodes_left:
                    continue
                new_tokens.append(token_id)
                new_parents.append(under)
                known = self.end + len(new_tokens)
                ended = token_id in self.spec.end_token_ids
                room[known] = 0 if ended else room[under] - 1
            else:
                room[known] = self.room(known)
            number_of[index + 1] = known
        return NewNodes(new_tokens, new_parents)

    def commit(self, position: int, token_ids: Sequence[int]) -> Kept:
        """Add committed tokens. The subtree that agrees with all of them stays, the rest goes.

        Raises ProtocolError when `position` is not the number of tokens committed so far.
        """
        if position != self.num_committed:
            raise ProtocolError(
                f"outcome.position: expected {self.num_committed}, the number of committed tokens, "
                f"got {position}"
            )
        node = ROOT
        path: list[int] = []
        for token_id in token_ids:
            child = self.child_with(node, token_id)
            if child is None:
                break
            path.append(child)
            node = child
        agreed = len(path) == len(token_ids)
        running = self._hashes[node]
        for token_id in token_ids[len(path) :]:
            running = extend_hash(running, token_id)
        nodes = self._below(node) if agreed else []
        self.committed.extend(token_ids)
        self._keep(node, nodes, running)
        self._told_last = self._told_until_grant = False
        return Kept(tuple(token_ids), tuple(path), tuple(nodes), agreed)

    def _below(self, top: int) -> list[int]:
        inside = {top}
        below = []
        for node in range(top + 1, len(self.tokens)):
            if self.parents[node] in inside:
                inside.add(node)
                below.append(node)
        return below

    def _keep(self, root: int, nodes: Sequence[int], root_hash: int) -> None:
        """Make `root` (or what was committed beside the tree) node 0, and `nodes` the rest."""
        number_of = {root: ROOT} | {node: index for index, node in enumerate(nodes, start=1)}
        rise = self._depths[root]
        self.distributions = {
            number_of[node]: pairs
            for node, pairs in self.distributions.items()
            if nodes and node in number_of
        }
        self.parents = [ROOT, *(number_of[self.parents[node]] for node in nodes)]
        self.multiplicities = [1, *(self.multiplicities[node] for node in nodes)]
        self._depths = [0, *(self._depths[node] - rise for node in nodes)]
        self._hashes = [root_hash, *(self._hashes[node] for node in nodes)]
        self.tokens = [self.committed[-1], *(self.tokens[node] for node in nodes)]
        self._children = [[] for _ in self.tokens]
        for node in range(1, len(self.tokens)):
            self._children[self.parents[node]].append(node)

    def check_integrity(self) -> None:
        """Assert that tokens, parents, hashes and depths belong together."""
        running = EMPTY_PREFIX_HASH
        for token_id in self.committed:
            running = extend_hash(running, token_id)
        assert self._hashes[ROOT] == running, "the hash of the committed tokens is stale"
        assert self.tokens[ROOT] == self.committed[-1]
        for node in range(1, len(self.tokens)):
            parent = self.parents[node]
            assert parent < node, "a child before its parent"
            assert node in self._children[parent]
            assert self._depths[node] == self._depths[parent] + 1
            assert self._hashes[node] == extend_hash(self._hashes[parent], self.tokens[node])
        assert sum(map(len, self._children)) == self.num_nodes == len(self._hashes) - 1
        assert all(self._children[node] for node in self.distributions), "pairs without children"

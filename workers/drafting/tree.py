"""One sequence at a drafter: its committed tokens, the nodes drafted after them, and its grant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.errors import ProtocolError
from paceline.limits import MAX_PROPOSED
from paceline.options import Stopping
from paceline.prefix_hash import EMPTY_PREFIX_HASH, extend_hash, hash_on, hash_prefix
from paceline.sampling import SequenceSpec
from workers.verification.candidates import SparseProbs
from workers.verification.prefix import CountedText, Prefix
from workers.verification.rule import rule_named
from workers.verification.structure import Follower

ROOT = 0
"""Node number of the last committed token. The drafted nodes follow from 1 on."""

PIECE = 2048
"""Maximum number of tokens of a long text that are processed at once. Hashing and indexing them
takes some 5 ms, during which other sequences wait.
"""


@dataclass(slots=True)
class Grant:
    """A driver's permission to draft for positions below `until_position`, at most `nodes` nodes.

    The other fields are those of drafting.proto, Grant.
    """

    until_position: int = 0
    branches: int = 1
    nodes: int = 0
    tokens_per_ms: float = 0.0
    step_ms_per_candidate: float = 0.0
    drafting_is_free: bool = False
    fan_out: int = 0
    share: int = 0
    shares: int = 0


@dataclass(slots=True)
class NewNodes:
    """Nodes that a pass adds to a tree, numbered from its `num_nodes` + 1 on.

    `parents` are node numbers in the whole tree, new nodes included; None: a chain that continues
    `tree.end`. `distributions`: by node number, the pairs from which its children were drawn, for
    rules that need them. `multiplicities` as in drafting.proto.
    """

    token_ids: Sequence[int] = ()
    parents: Sequence[int] | None = None
    distributions: Mapping[int, SparseProbs] = field(default_factory=dict)
    multiplicities: Sequence[int] = ()


@dataclass(slots=True)
class Kept:
    """The nodes that an outcome committed or kept, by their numbers from before the outcome.

    `token_ids`: the tokens that the outcome committed. `path`: the nodes that were committed, in
    order. `nodes`: the nodes that stayed; nodes[i] is now node i + 1. `agreed`: all committed
    tokens were nodes, so the last node of `path` is now the root.
    """

    token_ids: tuple[int, ...]
    path: tuple[int, ...]
    nodes: tuple[int, ...]
    agreed: bool


class DraftTree:
    """Committed tokens and the nodes drafted after them; a chain is a tree without forks.

    Node 0 is the last committed token. Parents have smaller numbers than their children. The
    constructor processes the first PIECE tokens, and `settle` the rest of a long text; nothing can
    be drafted before that is done.

    A proposer reads the tree, and the desk changes it: a proposer calls none of the methods
    `settle`, `set_grant`, `tell_last`, `extend` and `outcome`.
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
        """`max_position`: no token is drafted at or beyond it. `vocab_size`: no token id at or
        above it is drafted; None: unbounded. `tenant`: requests of one tenant may share what the
        drafter learns and computes.
        """
        self.spec = spec
        self.vocab_size = vocab_size
        self.stopping = stopping
        self.tenant = tenant
        self.max_position = max_position
        self.needs_draft_probs = rule_named(spec.rule).needs_draft_probs
        self._text = CountedText(token_ids, prompt_length=spec.prompt_length)
        self.committed: Sequence[int] = self._text.token_ids
        self.distributions: dict[int, SparseProbs] = {}
        # By node number, the root's entry first.
        self.tokens = [self.committed[-1]]
        self.parents = [ROOT]
        self.multiplicities = [1]
        self._depths = [0]
        # The root's hash is that of the first `num_settled` committed tokens.
        self._hashes = [EMPTY_PREFIX_HASH]
        self.num_settled = 0
        """Number of committed tokens that were processed."""
        self._children: list[list[int]] = [[]]
        self.is_chain = True
        """Whether each node continues the one before."""
        # Cached, since a pass reads it several times; None after a change.
        self._is_ready: bool | None = None
        self._told_last = self._told_until_grant = False
        self._take_grant(Grant())
        self.settle(PIECE)

    @property
    def is_settled(self) -> bool:
        return self.num_settled == len(self.committed)

    @property
    def num_committed(self) -> int:
        return len(self.committed)

    @property
    def num_nodes(self) -> int:
        return len(self.tokens) - 1

    @property
    def end(self) -> int:
        """The newest node; in a chain, its end."""
        return len(self.tokens) - 1

    def depth(self, node: int) -> int:
        """The number of nodes from the root to this one, without the root."""
        return self._depths[node]

    def children(self, node: int) -> Sequence[int]:
        return self._children[node]

    def child_with(self, node: int, token_id: int) -> int | None:
        """The first child of a node with this token, or None."""
        return next(
            (child for child in self._children[node] if self.tokens[child] == token_id), None
        )

    def follow(self, follower: Follower | None) -> None:
        """Have prefixes follow the request's structure, for a proposer that draws by masks."""
        self._text.follower = follower

    def path_to(self, node: int) -> list[int]:
        """The nodes from a child of the root to this one."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def chain_nodes(self) -> list[int]:
        """The path from the root that follows first children, without the root."""
        path = []
        node = ROOT
        while self._children[node]:
            node = self._children[node][0]
            path.append(node)
        return path

    def prefix(self, node: int) -> Prefix:
        """All token ids up to and including a node's. A view, valid while the node exists."""
        path = tuple([self.tokens[step] for step in self.path_to(node)])
        return Prefix(self._text, len(self.committed), path)

    def base(self, node: int) -> tuple[int, int]:
        """The length and hash of the prefix that ends with a node."""
        return len(self.committed) + self._depths[node], self._hashes[node]

    def prefix_hash(self, node: int) -> int:
        return self._hashes[node]

    def unknown_part(self, token_ids: Sequence[int], parents: Sequence[int]) -> NewNodes:
        """The nodes of a proposed tree (parents as on the wire) that this tree does not have yet.

        Nodes beyond the grant or below an end are left out with all their descendants. For drafters
        that use no random numbers and propose a whole tree every time.
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
        """The number of tokens that may follow a node, one after another. `grant.nodes` may allow
        fewer.
        """
        left = self._deepest - self._depths[node]
        if left <= 0 or (self.spec.end_token_ids and self.ends(node)):
            return 0
        return left

    def with_room(self, nodes: Iterable[int]) -> list[int]:
        if self.spec.end_token_ids:
            return [node for node in nodes if self.room(node) > 0]
        deepest, depths = self._deepest, self._depths
        return [node for node in nodes if depths[node] < deepest]

    @property
    def nodes_left(self) -> int:
        """The number of nodes that a pass may still add under the grant, at most MAX_PROPOSED."""
        left = self._most_nodes - len(self.tokens) + 1
        return min(left, MAX_PROPOSED) if left > 0 else 0

    @property
    def chain_room(self) -> int:
        """The number of tokens that may follow the end of a chain."""
        room, left = self.room(len(self.tokens) - 1), self.nodes_left
        return room if room < left else left

    @property
    def price(self) -> float:
        """The smallest chance at which a candidate is worth its time in a step; 0: any is."""
        grant = self.grant
        by_cost = self.stopping is Stopping.COST
        return grant.tokens_per_ms * grant.step_ms_per_candidate if by_cost else 0.0

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
        """Whether the grant's nodes are used up. False for a chain if `grant.nodes` is 0."""
        if len(self.tokens) <= self._most_nodes:
            return False
        return self.grant.nodes > 0 or not self.is_chain

    @property
    def finished(self) -> bool:
        """Whether the tree itself shows that nothing can follow, whatever the driver grants."""
        ends_as_chain = self.grant.fan_out == 0 and self.is_chain
        if not self.spec.end_token_ids:  # by its length alone
            return len(self.committed) + self._depths[-1 if ends_as_chain else ROOT] >= (
                self.max_position
            )
        return self.ends(ROOT) or (ends_as_chain and self.ends(self.end))

    @property
    def wants_last(self) -> bool:
        """Whether the driver waits for nodes that cannot come, and was not told so yet."""
        if self._told_last or not self.is_settled:
            return False
        reached = self.num_committed + (self._depths[-1] if self.is_chain else 0)
        if self.grant.until_position <= reached:
            return False
        return self.used_up or self.finished

    def settle(self, count: int) -> None:
        """Process the next `count` committed tokens, or as many as there are."""
        piece = self.committed[self.num_settled : self.num_settled + count]
        self._hashes[ROOT] = hash_on(self._hashes[ROOT], piece)
        self.num_settled += len(piece)
        self._is_ready = None

    def set_grant(self, grant: Grant) -> None:
        """Replace the grant. If it allows more, it undoes `tell_last(until_grant=True)`."""
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
        """Note that the driver was told that nothing more comes before the next outcome.

        `until_grant`: more comes after a larger grant.
        """
        self._told_last, self._told_until_grant = True, until_grant
        self._is_ready = None

    def extend(self, new: NewNodes) -> None:
        """Add drafted nodes. The grant must allow them, and none may follow an end token."""
        if not new.token_ids:
            return
        parents, first = new.parents, len(self.tokens)
        if parents is None:
            parents = range(first - 1, first - 1 + len(new.token_ids))
        number, depths, hashes, children = first, self._depths, self._hashes, self._children
        for token_id, parent in zip(new.token_ids, parents, strict=True):
            assert 0 <= parent < number, "a child before its parent"
            children[parent].append(number)
            children.append([])
            depths.append(depths[parent] + 1)
            hashes.append(extend_hash(hashes[parent], token_id))
            number += 1
        self.tokens += new.token_ids
        self.parents += parents
        self.multiplicities += new.multiplicities or (1,) * len(new.token_ids)
        self.is_chain = depths[-1] == number - 1
        if new.distributions:
            self.distributions.update(new.distributions)
        self._is_ready = None
        assert number <= 1 + self._most_nodes, "drafted more nodes than granted"
        deepest = depths[-1] if first == number - 1 else max(depths[first:])
        assert deepest <= self._deepest, "drafted beyond the grant"
        if self.spec.end_token_ids:
            assert not any(map(self.ends, self.parents[first:])), "drafted beyond an end"

    def outcome(self, position: int, token_ids: Sequence[int]) -> Kept:
        """Commit `token_ids`, the first of them at `position`. This undoes `tell_last`.

        Raises ProtocolError if `position` is not the number of committed tokens.
        """
        if position != self.num_committed:
            raise ProtocolError(
                f"outcome.position: expected {self.num_committed}, the number of committed tokens, "
                f"got {position}"
            )
        self._told_last = self._told_until_grant = False
        kept = self._commit(token_ids)
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

    def _commit(self, token_ids: Sequence[int]) -> Kept:
        """Add committed tokens. The subtree below the last one stays; other nodes are dropped."""
        if not self.is_settled:  # nothing was drafted yet
            self._text.extend(token_ids)
            self.tokens = [self.committed[-1]]
            return Kept(tuple(token_ids), (), (), agreed=False)
        node = ROOT
        path: list[int] = []
        for token_id in token_ids:
            child = self.child_with(node, token_id)
            if child is None:
                break
            path.append(child)
            node = child
        agreed = len(path) == len(token_ids)
        running = hash_on(self._hashes[node], token_ids[len(path) :])
        nodes = self._below(node) if agreed and node < self.end else []
        self._text.extend(token_ids)
        self.num_settled = len(self.committed)
        self._keep(node, nodes, running)
        return Kept(tuple(token_ids), tuple(path), tuple(nodes), agreed)

    def _below(self, top: int) -> list[int]:
        if self.is_chain:
            return list(range(top + 1, len(self.tokens)))
        below: list[int] = []
        layer = self._children[top]
        while layer:
            below += layer
            layer = [child for node in layer for child in self._children[node]]
        return sorted(below)

    def _keep(self, root: int, nodes: Sequence[int], root_hash: int) -> None:
        """Make `root` node 0, and `nodes` the nodes from 1 on.

        Without `nodes`, the new root is the last committed token, whether or not it was a node.
        """
        if not nodes:
            self.distributions = {}
            self.tokens, self.parents, self.multiplicities = [self.committed[-1]], [ROOT], [1]
            self._depths, self._hashes, self._children = [0], [root_hash], [[]]
            self.is_chain = True
            return
        if self.is_chain:
            self._keep_chain(root, root_hash)
            return
        number_of = {root: ROOT} | {node: index for index, node in enumerate(nodes, start=1)}
        rise = self._depths[root]
        self.distributions = {
            number_of[node]: pairs
            for node, pairs in self.distributions.items()
            if node in number_of
        }
        self.parents = [ROOT, *(number_of[self.parents[node]] for node in nodes)]
        self.multiplicities = [1, *(self.multiplicities[node] for node in nodes)]
        self._depths = [0, *(self._depths[node] - rise for node in nodes)]
        self.is_chain = self._depths[-1] == len(nodes)
        self._hashes = [root_hash, *(self._hashes[node] for node in nodes)]
        self.tokens = [self.committed[-1], *(self.tokens[node] for node in nodes)]
        self._children = [[] for _ in self.tokens]
        for node in range(1, len(self.tokens)):
            self._children[self.parents[node]].append(node)

    def _keep_chain(self, root: int, root_hash: int) -> None:
        """As `_keep`, for a chain: all nodes after `root` stay."""
        first, count = root + 1, self.end - root
        self.distributions = {
            node - root: pairs for node, pairs in self.distributions.items() if node >= root
        }
        self.parents = [ROOT, *range(count)]
        self.multiplicities = [1, *self.multiplicities[first:]]
        self._depths = list(range(count + 1))
        self._hashes = [root_hash, *self._hashes[first:]]
        self.tokens = [self.committed[-1], *self.tokens[first:]]
        self._children = [*([node] for node in range(1, count + 1)), []]

    def check_integrity(self) -> None:
        running = hash_prefix(self.committed[: self.num_settled])
        assert self._hashes[ROOT] == running, "the hash of the committed tokens is stale"
        assert self.is_settled or not self.num_nodes, "drafted before all was taken in"
        assert self.tokens[ROOT] == self.committed[-1]
        for node in range(1, len(self.tokens)):
            parent = self.parents[node]
            assert parent < node, "a child before its parent"
            assert node in self._children[parent]
            assert self._depths[node] == self._depths[parent] + 1
            assert self._hashes[node] == extend_hash(self._hashes[parent], self.tokens[node])
        assert self.is_chain == (self._depths == list(range(len(self.tokens))))
        assert sum(map(len, self._children)) == self.num_nodes == len(self._hashes) - 1
        assert all(self._children[node] for node in self.distributions), "pairs without children"

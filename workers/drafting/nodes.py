"""The shape of what is drafted after a sequence's committed tokens: nodes, parents, hashes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.prefix_hash import EMPTY_PREFIX_HASH, extend_hash, hash_on, hash_prefix
from workers.verification.candidates import SparseProbs
from workers.verification.prefix import CountedText, Prefix

ROOT = 0
"""Node number of the last committed token. The drafted nodes follow from 1 on."""

PIECE = 2048
"""Tokens of a long text that are processed at once. Hashing and indexing them takes some 5 ms,
during which other sequences wait.
"""


@dataclass(slots=True)
class NewNodes:
    """Nodes that a pass adds to a tree, numbered from its `num_nodes` + 1 on.

    `parents` are node numbers in the whole tree, new nodes included; None: a chain that continues
    `tree.end`. `distributions`: by node number, what the node's children were drawn from, for rules
    that need it. `multiplicities` as in drafting.proto.
    """

    token_ids: Sequence[int] = ()
    parents: Sequence[int] | None = None
    distributions: Mapping[int, SparseProbs] = field(default_factory=dict)
    multiplicities: Sequence[int] = ()


@dataclass(slots=True)
class Kept:
    """What an outcome (its `token_ids`) left of a tree, in the numbers from before the outcome.

    `path`: the nodes that were committed, in order. `nodes`: those that stayed; nodes[i] is now
    node i + 1. `agreed`: all committed tokens were nodes, so that the last of `path` is now the
    root.
    """

    token_ids: tuple[int, ...]
    path: tuple[int, ...]
    nodes: tuple[int, ...]
    agreed: bool


class NodeTree:
    """Committed tokens and the nodes drafted after them; a chain is a tree without forks.

    Node 0 is the last committed token. Parents have smaller numbers than their children. The
    constructor processes the first PIECE tokens, and `settle` the rest of a long text; nothing can
    be drafted before that is done.
    """

    def __init__(self, token_ids: Sequence[int], *, prompt_length: int) -> None:
        self._text = CountedText(token_ids, prompt_length=prompt_length)
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
        self.settle(PIECE)

    @property
    def is_settled(self) -> bool:
        """Whether all committed tokens were processed."""
        return self.num_settled == len(self.committed)

    def settle(self, count: int) -> None:
        """Process the next `count` committed tokens, or as many as there are."""
        piece = self.committed[self.num_settled : self.num_settled + count]
        self._hashes[ROOT] = hash_on(self._hashes[ROOT], piece)
        self.num_settled += len(piece)

    @property
    def num_committed(self) -> int:
        """Number of committed tokens, prompt included."""
        return len(self.committed)

    @property
    def num_nodes(self) -> int:
        """Number of drafted nodes."""
        return len(self.tokens) - 1

    @property
    def end(self) -> int:
        """The newest node; in a chain, its end."""
        return len(self.tokens) - 1

    def depth(self, node: int) -> int:
        """The number of nodes from the root to this one, without the root."""
        return self._depths[node]

    def children(self, node: int) -> Sequence[int]:
        """The children of a node in the order in which they were drawn."""
        return self._children[node]

    def child_with(self, node: int, token_id: int) -> int | None:
        """The first child of a node with this token, or None."""
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
        """The hash of the prefix that ends with a node."""
        return self._hashes[node]

    def extend(self, new: NewNodes) -> None:
        """Add drafted nodes."""
        parents, number = new.parents, len(self.tokens)
        if parents is None:
            parents = range(number - 1, number - 1 + len(new.token_ids))
        depths, hashes, children = self._depths, self._hashes, self._children
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

    def commit(self, token_ids: Sequence[int]) -> Kept:
        """Add committed tokens. The subtree that agrees with all of them stays, the rest goes."""
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
        """Make `root` node 0 and `nodes` the others.

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
        """The same for a chain: all nodes after `root` stay."""
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
        """Assert that tokens, parents, hashes and depths match."""
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

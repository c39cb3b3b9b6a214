"""The candidates of a sequence after its committed tokens, and which of them a step verifies."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.decoding.counts import Foresight
from cluster.decoding.windows import (
    MAX_MERGED,
    MERGED_CHANCES,
    NO_CANDIDATES,
    RANK_CHANCES,
    Node,
    Window,
    likeliest,
    num_likeliest,
    window_of,
)
from paceline.prefix_hash import extend_hash
from paceline.rules import MAX_WINDOW


class Candidates:
    """A tree of candidates under `root`, the last committed token, in order of arrival.

    `chain`: the tree has at most one branch. `verified_width`: some candidates are held for other
    outcomes; a step verifies the likeliest of all, at most this many children of a node. With 1 it
    verifies the chain of first children. None: a step verifies what came first. `merged`: one
    drafter of each kind proposes; their candidates are verified side by side, so a step is that
    much wider.
    """

    __slots__ = (
        "_apart",
        "_by_hash",
        "_nodes",
        "_pinned",
        "_rank_chances",
        "chain",
        "root",
        "verified_width",
    )

    def __init__(
        self, root: Node, *, chain: bool, verified_width: int | None, merged: bool
    ) -> None:
        self.chain = chain
        self.verified_width = verified_width
        self._rank_chances = RANK_CHANCES
        if merged and verified_width is not None:
            self.verified_width = verified_width + MAX_MERGED - 1
            self._rank_chances = MERGED_CHANCES
        self._nodes: list[Node] = []
        self._pinned: list[Node] = []
        self._by_hash: dict[int, Node] = {}
        # Whether the pinned candidates have left the tree, since another drafter took over.
        self._apart = False
        self._set_root(root)

    @property
    def num_candidates(self) -> int:
        """Candidates held, those being verified included."""
        return len(self._nodes)

    def num_verifiable(self, limit: int) -> int:
        """Candidates that a step of at most `limit` could verify; without a width, all held."""
        if self.verified_width is None:
            return self.num_candidates
        return num_likeliest(self.root, limit, width=self.verified_width)

    @property
    def num_pinned(self) -> int:
        """Candidates that are being verified."""
        return len(self._pinned)

    def pin(self, limit: int, *, num_paths: int = 0) -> Window:
        """Choose the `limit` candidates to verify, and hold them until the verdict.

        `num_paths` (k-SEQ): take all candidates down to the depth at which this many paths surely
        fit, because the cut must not depend on what the candidates are.
        """
        if not self._nodes:
            self._pinned = []
            return NO_CANDIDATES
        if num_paths:
            deepest = self.root.length + limit // num_paths
            self._pinned = [node for node in self._nodes if node.length <= deepest]
        else:
            self._pinned = self._choose(limit)
        return window_of(
            self.root, self._pinned, with_multiplicities=bool(num_paths), in_line=self._in_line
        )

    def chain_of(self, limit: int) -> Window:
        """A window of `limit` candidates that is not held. Its verdict is read by content."""
        nodes = self._choose(limit)
        return window_of(self.root, nodes, with_multiplicities=False, in_line=self._in_line)

    def unpin(self) -> None:
        """Release what was pinned: it gets no verdict."""
        self._pinned = []
        self._apart = False

    def run_ahead_follows(self, accepted: Sequence[int]) -> bool:
        """Whether candidates beyond the window continue this path, all of which was accepted.

        Candidates of a drafter that did not draw the window do not count.
        """
        if self._apart:
            return False
        leaf = self._pinned[accepted[-1]] if accepted else self.root
        pinned = {id(node) for node in self._pinned}
        return bool(leaf.children) and not any(id(child) in pinned for child in leaf.children)

    def foresight(self, accepted: Sequence[int], token_id: int | None) -> Foresight:
        """What is held at the position after this path of pinned candidates.

        `token_id`: the token that comes there; None: none comes yet.
        """
        leaf = self._pinned[accepted[-1]] if accepted else self.root
        if token_id is None or self._apart or not leaf.children:
            return Foresight.NOTHING
        if leaf.children[0].token_id == token_id:
            return Foresight.FIRST
        held = any(child.token_id == token_id for child in leaf.children)
        return Foresight.BRANCH if held else Foresight.OTHERS

    def drop_run_ahead(self) -> None:
        """Forget all candidates, since another drafter begins.

        Candidates that are being verified leave the tree and wait for their verdict. In the tree
        they would be siblings of the other drafter's draws, with one distribution for both.
        """
        self._keep([])
        self._apart = bool(self._pinned)

    def check_integrity(self) -> None:
        """Assert that the tree is consistent."""
        seen = {id(self.root)}
        for node in self._nodes:
            assert node.parent is not None
            assert id(node.parent) in seen, "a candidate stands before its parent"
            assert node in node.parent.children
            assert node.length == node.parent.length + 1
            assert node.prefix_hash == extend_hash(node.parent.prefix_hash, node.token_id)
            seen.add(id(node))
        assert sum(len(node.children) for node in [self.root, *self._nodes]) == len(self._nodes)
        assert self._apart or all(id(node) in seen for node in self._pinned)
        if self.verified_width is not None:
            for limit in (1, 4, MAX_WINDOW):
                assert self.num_verifiable(limit) == len(self._choose(limit)), "counted otherwise"
        assert not self.chain or all(len(n.children) <= 1 for n in [self.root, *self._nodes])

    def _set_root(self, root: Node) -> None:
        root.parent = None
        self.root = root
        self._pinned = []
        self._apart = False
        self._keep_below(root)

    @property
    def _in_line(self) -> bool:
        """Whether a step verifies a chain, whatever is held."""
        return self.chain or self.verified_width == 1

    def _keep_below(self, root: Node) -> None:
        """Keep only what hangs from `root`, which is held already.

        In a chain these are all candidates from some position on.
        """
        if not root.children:
            root.distribution = None  # The next children may be another drafter's draws.
            self._nodes, self._by_hash = [], {root.prefix_hash: root}
            return
        kept: list[Node] = []
        if self.chain:
            first = root.children[0].length - self._nodes[0].length
            kept = self._nodes[first:]
        else:
            held = {root}
            for node in self._nodes:
                if node.parent in held:
                    held.add(node)
                    kept.append(node)
        for node in (root, *kept):
            if node.distribution is not None and not node.children:
                node.distribution = None  # As above.
        self._nodes = kept
        # Of nodes with equal prefixes keep the first, and the root above all.
        self._by_hash = {node.prefix_hash: node for node in reversed(kept)}
        self._by_hash[root.prefix_hash] = root

    def _cut_chain(self, child: Node) -> None:
        """Drop a candidate of a chain and everything after it."""
        parent = child.parent
        assert parent is not None
        first = child.length - self._nodes[0].length
        for node in self._nodes[first:]:
            if self._by_hash.get(node.prefix_hash) is node:
                del self._by_hash[node.prefix_hash]
        del self._nodes[first:]
        child.parent = None
        parent.children, parent.distribution = [], None

    def _keep(self, nodes: Sequence[Node]) -> None:
        """Keep those of `nodes` that hang from the root, and nothing else."""
        root = self.root
        if not nodes or not root.children:
            root.children, root.distribution = [], None
            self._nodes, self._by_hash = [], {root.prefix_hash: root}
            return
        held = {id(root)}
        kept = []
        by_hash = {root.prefix_hash: root}
        for node in nodes:
            if id(node.parent) in held:
                held.add(id(node))
                kept.append(node)
                by_hash.setdefault(node.prefix_hash, node)
        for node in (root, *kept):
            if node.children:
                node.children = [child for child in node.children if id(child) in held]
            if not node.children:
                node.distribution = None  # The next children may be another drafter's draws.
        self._nodes, self._by_hash = kept, by_hash

    def _choose(self, limit: int) -> list[Node]:
        """The candidates that a step verifies, each after its parent."""
        if self.verified_width is None:
            return self._nodes[:limit]
        return likeliest(
            self.root, limit, width=self.verified_width, rank_chances=self._rank_chances
        )

"""The tokens of one sequence: what is committed, and the tree of candidates that continue it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cluster.decoding.counts import Foresight
from cluster.decoding.events import Proposal
from cluster.decoding.windows import (
    MERGED_CHANCES,
    RANK_CHANCES,
    Node,
    Window,
    likeliest,
    put_child,
    window_of,
)
from paceline.prefix_hash import extend_hash, hash_prefix
from paceline.rules import DRAFTER_KINDS

# Where a token of a proposal lies: a number of committed tokens, a node, or nowhere.
_Place = int | Node | None


class TokenTree:
    """Committed tokens, and the candidates beyond them in the order in which they arrived.

    Proposals are placed by content: under the node whose prefix has the proposal's length and
    hash. So it does not matter when a proposal arrives, or how often. With `chain` there is one
    branch at most: where a proposal disagrees, the newer tokens win, since they are what the
    drafter goes on from, but for those that are being verified.

    With `verified_width` some of the candidates are held for other outcomes: a step verifies the
    likeliest of them, at most so many children of a node. Where it is 1, that is the chain of first
    children. Without it a step verifies what came first. `merged`: candidates of a drafter of
    each kind stand side by side and are verified, so that much wider.
    """

    __slots__ = (
        "_by_hash",
        "_foreign",
        "_hashes",
        "_nodes",
        "_pinned",
        "_rank_chances",
        "chain",
        "repeats",
        "root",
        "token_ids",
        "verified_width",
    )

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        *,
        chain: bool = True,
        verified_width: int | None = None,
        merged: bool = False,
    ) -> None:
        self.chain = chain
        self.verified_width = verified_width
        self._rank_chances = RANK_CHANCES
        if merged and verified_width is not None:
            self.verified_width = verified_width + len(DRAFTER_KINDS) - 1
            self._rank_chances = MERGED_CHANCES
        self.token_ids: list[int] = []
        self.repeats = 0
        """Tokens of proposals that were held already as candidates."""
        self._hashes = [hash_prefix(())]
        self._nodes: list[Node] = []
        self._pinned: list[Node] = []
        self._by_hash: dict[int, Node] = {}
        self._foreign = False
        for token_id in prompt_token_ids:
            self._hashes.append(extend_hash(self._hashes[-1], token_id))
            self.token_ids.append(token_id)
        self._set_root(Node(self.token_ids[-1], len(self.token_ids), self._hashes[-1]))

    @property
    def num_committed(self) -> int:
        """Committed tokens, the prompt included."""
        return len(self.token_ids)

    @property
    def num_candidates(self) -> int:
        """Candidates held, those that are being verified included."""
        return len(self._nodes)

    def num_verifiable(self, limit: int) -> int:
        """Candidates that a step of at most `limit` could verify, perhaps more than those."""
        return self.num_candidates if self.verified_width is None else len(self._choose(limit))

    @property
    def num_pinned(self) -> int:
        """Candidates that are being verified."""
        return len(self._pinned)

    def attach(
        self, proposal: Proposal, *, until_position: int, max_nodes: int, leads: bool = True
    ) -> bool:
        """Place a proposal: skip what is held already, take the rest.

        Takes no token at or beyond `until_position` and holds at most `max_nodes` candidates.
        Returns False, and takes nothing, when the proposal continues something else than this.
        """
        base = self._place_of_base(proposal.base_length, proposal.base_hash)
        parents = proposal.parents
        if base is None or (self.chain and parents and parents != tuple(range(len(parents)))):
            return False
        limits = until_position, max_nodes, leads
        if len(proposal.token_ids) == 1 and not (proposal.multiplicities or proposal.distributions):
            return self._after(base, proposal.token_ids[0], (), *limits) is not None
        places: list[_Place] = [base]
        used: set[int] = set()
        for index, token_id in enumerate(proposal.token_ids):
            above = places[parents[index] if parents else index]
            place = self._after(above, token_id, used, *limits)
            if isinstance(place, Node):
                used.add(id(place))
                if proposal.multiplicities:
                    place.multiplicity = proposal.multiplicities[index]
            places.append(place)
        for number, distribution in proposal.distributions.items():
            place = places[number]
            if isinstance(place, Node) and place.distribution is None:
                place.distribution = distribution
        return len(places) == 1 or places.count(None) < len(places) - 1

    def pin(self, limit: int, *, num_paths: int = 0) -> Window:
        """The `limit` candidates that are to be verified, held fast until the verdict.

        With `num_paths` (k-SEQ) all candidates down to the depth at which so many paths surely
        fit: which of them are cut off must not depend on what they are.
        """
        if num_paths:
            deepest = self.root.length + limit // num_paths
            self._pinned = [node for node in self._nodes if node.length <= deepest]
        else:
            self._pinned = self._choose(limit)
        return window_of(
            self.root, self._pinned, with_multiplicities=bool(num_paths), in_line=self._in_line
        )

    def chain_of(self, limit: int) -> Window:
        """The `limit` candidates of a window that nothing holds fast: it is judged by content."""
        nodes = self._choose(limit)
        return window_of(self.root, nodes, with_multiplicities=False, in_line=self._in_line)

    def unpin(self) -> None:
        """There will be no verdict on what was pinned."""
        self._pinned = []
        if self._foreign:
            self._foreign = False
            self._keep([])  # What the drafter of now drew may stand beside it.

    def run_ahead_follows(self, accepted: Sequence[int]) -> bool:
        """Whether candidates beyond the window continue this path, all of which was accepted."""
        leaf = self._pinned[accepted[-1]] if accepted else self.root
        pinned = {id(node) for node in self._pinned}
        return bool(leaf.children) and not any(id(child) in pinned for child in leaf.children)

    def foresight(self, accepted: Sequence[int], token_id: int | None) -> Foresight:
        """What is held for the place after this path of pinned candidates, where `token_id` comes.

        `token_id` None: nothing comes there yet.
        """
        leaf = self._pinned[accepted[-1]] if accepted else self.root
        if token_id is None or not leaf.children:
            return Foresight.NOTHING
        if leaf.children[0].token_id == token_id:
            return Foresight.FIRST
        held = any(child.token_id == token_id for child in leaf.children)
        return Foresight.BRANCH if held else Foresight.OTHERS

    def commit(self, accepted: Sequence[int], token_id: int | None) -> tuple[int, ...]:
        """Commit a path of pinned candidates and the token after them; returns the new tokens.

        Candidates that continue them stay. `token_id` None: the path alone.
        """
        path = [self._pinned[index] for index in accepted]
        assert [node.parent for node in path] == [self.root, *path][: len(path)], "no path"
        return self._go_along(path, () if token_id is None else (token_id,))

    def advance(self, token_ids: Sequence[int]) -> None:
        """Commit tokens, whatever was verified. Candidates that continue them stay."""
        self._go_along([], token_ids)

    def _go_along(self, path: list[Node], token_ids: Sequence[int]) -> tuple[int, ...]:
        """Commit these candidates and the tokens after them; returns all of them."""
        root = path[-1] if path else self.root
        for token_id in token_ids:
            for child in root.children:
                if child.token_id == token_id:
                    root = child
                    break
            else:
                prefix_hash = extend_hash(root.prefix_hash, token_id)
                root = Node(token_id, root.length + 1, prefix_hash)
            path.append(root)
        committed = tuple([node.token_id for node in path])
        self.token_ids += committed
        self._hashes += [node.prefix_hash for node in path]
        if path or self._pinned:
            self._set_root(root)
        return committed

    def drop_run_ahead(self) -> None:
        """Forget all candidates but those that are being verified: another drafter begins."""
        self._keep(self._pinned)
        self._foreign = bool(self._pinned)

    def check_integrity(self) -> None:
        """Assert that hashes fit the tokens and the tree hangs together."""
        assert self._hashes[-1] == hash_prefix(self.token_ids) == self.root.prefix_hash
        assert self.root.length == len(self.token_ids)
        seen = {id(self.root)}
        for node in self._nodes:
            assert node.parent is not None
            assert id(node.parent) in seen, "a candidate stands before its parent"
            assert node in node.parent.children
            assert node.length == node.parent.length + 1
            assert node.prefix_hash == extend_hash(node.parent.prefix_hash, node.token_id)
            seen.add(id(node))
        assert sum(len(node.children) for node in [self.root, *self._nodes]) == len(self._nodes)
        assert all(id(node) in seen for node in self._pinned)
        assert not self.chain or all(len(n.children) <= 1 for n in [self.root, *self._nodes])

    def _set_root(self, root: Node) -> None:
        root.parent = None
        self.root = root
        self._pinned = []
        self._foreign = False
        self._keep_below(root)

    @property
    def _in_line(self) -> bool:
        """Whether what a step verifies is a chain, whatever is held."""
        return self.chain or self.verified_width == 1

    def _keep_below(self, root: Node) -> None:
        """Hold what hangs from a root, all of which is held already. What is below stays as it is.

        In a chain that is all from some place on.
        """
        kept: list[Node] = []
        if root.children and self.chain:
            first = root.children[0].length - self._nodes[0].length
            kept = self._nodes[first:]
        elif root.children:
            held = {root}
            for node in self._nodes:
                if node.parent in held:
                    held.add(node)
                    kept.append(node)
        for node in (root, *kept):
            if node.distribution is not None and not node.children:
                node.distribution = None  # The next children may be another drafter's draws.
        self._nodes = kept
        # Of equal prefixes the first, but the root above all.
        self._by_hash = {node.prefix_hash: node for node in reversed(kept)}
        self._by_hash[root.prefix_hash] = root

    def _keep(self, nodes: Sequence[Node]) -> None:
        """Hold those of `nodes` that hang from the root, and nothing else."""
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

    def _place_of_base(self, length: int, prefix_hash: int) -> _Place:
        if length < len(self.token_ids):
            return length if self._hashes[length] == prefix_hash else None
        node = self._by_hash.get(prefix_hash)
        return node if node is not None and node.length == length else None

    def _after(
        self,
        parent: _Place,
        token_id: int,
        used: Collection[int],
        until_position: int,
        max_nodes: int,
        leads: bool,
    ) -> _Place:
        """The place of a token after another one: a committed token's, or a child's.

        Not one that `used` holds the id of. A child is made where there is none and room for it.
        """
        if parent is None:
            return None
        if isinstance(parent, int):
            if self.token_ids[parent] != token_id:
                return None
            return self.root if parent + 1 == len(self.token_ids) else parent + 1
        if parent.length >= until_position:
            return None
        siblings = parent.children
        for child in siblings:
            if child.token_id == token_id and id(child) not in used:
                if leads and not child.leads:
                    siblings.remove(child)
                    put_child(parent, child, leads=True)
                self.repeats += 1
                return child
        if siblings and self.chain:
            if any(node.parent is parent for node in self._pinned):
                return None
            siblings[0].parent = None
            self._keep(self._nodes)
        if len(self._nodes) >= max_nodes:
            return None
        prefix_hash = extend_hash(parent.prefix_hash, token_id)
        node = Node(token_id, parent.length + 1, prefix_hash, parent)
        put_child(parent, node, leads=leads)
        self._nodes.append(node)
        self._by_hash.setdefault(prefix_hash, node)
        return node

"""The tokens of one sequence: what is committed, and the tree of candidates that continue it."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cluster.decoding.counts import Foresight
from cluster.decoding.events import Proposal
from paceline.errors import ProtocolError
from paceline.limits import MAX_BRANCHES, MAX_WINDOW
from paceline.prefix_hash import extend_hash, hash_prefix
from workers.verification.candidates import SparseProbs

MAX_SIBLINGS = 64
"""The most candidates under one node. Several drafters draw them, each about ten at most. Each new
candidate is compared with all that the node has, so this bounds the work."""


@dataclass(slots=True, eq=False)
class Node:
    """A candidate, or the last committed token, which is the root.

    `length`: tokens up to this one, itself included; `prefix_hash`: their hash. `distribution`:
    what its children were drawn from, if their rule needs it. `leads`: the sequence's first drafter
    drew it, not a helper; such children come first.
    """

    token_id: int
    length: int
    prefix_hash: int
    parent: Node | None = None
    multiplicity: int = 1
    leads: bool = True
    distribution: SparseProbs | None = None
    children: list[Node] = field(default_factory=list)


@dataclass(slots=True)
class Window:
    """The candidates of a slice, as in target.proto. Empty `parents`: a chain."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    multiplicities: tuple[int, ...]
    distributions: Mapping[int, SparseProbs]


NO_CANDIDATES = Window((), (), (), {})

RANK_CHANCES = (0.8, *(0.1 * 0.5**rank for rank in range(MAX_BRANCHES)))
"""Rough chances of a node's children by rank. They decide which nodes of a tree are verified."""

MAX_MERGED = 3
"""Most drafters whose candidates share a tree."""
MERGED_CHANCES = (0.7, *(0.25 * 0.5**rank for rank in range(MAX_BRANCHES + MAX_MERGED)))
"""The same if another drafter's candidate may come second."""


def likeliest(root: Node, limit: int, *, width: int, rank_chances: Sequence[float]) -> list[Node]:
    """The `limit` likeliest candidates, each after its parent, at most `width` children of a node.

    `rank_chances`: rough chances of a node's children by rank.
    """
    chosen: list[Node] = []
    if width == 1:
        node = root
        while len(chosen) < limit and node.children:
            node = node.children[0]
            chosen.append(node)
        return chosen
    heap: list[tuple[float, int, Node]] = []
    node, chance, pushed = root, 1.0, 0
    while len(chosen) < limit:
        for rank, child in enumerate(node.children[:width]):
            heapq.heappush(heap, (-chance * rank_chances[rank], pushed, child))
            pushed += 1
        if not heap:
            break
        negative, _, node = heapq.heappop(heap)
        chance = -negative
        chosen.append(node)
    return chosen


def num_likeliest(root: Node, limit: int, *, width: int) -> int:
    """How many candidates `likeliest` would choose."""
    if width == 1:
        return lead_length(root, limit)
    found = 0
    above = [root]
    while above and found < limit:
        children = above.pop().children
        if children:
            children = children[:width]
            found += len(children)
            above += children
    return min(found, limit)


def lead_length(root: Node, limit: int) -> int:
    """Length of the chain of first children below `root`, up to `limit`."""
    length = 0
    while length < limit and root.children:
        root, length = root.children[0], length + 1
    return length


def window_of(
    root: Node, nodes: Sequence[Node], *, with_multiplicities: bool, in_line: bool = False
) -> Window:
    """These candidates, each after its parent, in the form that a step takes.

    `in_line`: each is known to be the child of the one before.
    """
    if not nodes:
        return NO_CANDIDATES
    parents: Sequence[int] = range(len(nodes))
    if not in_line:
        number = {root: 0, **{node: index for index, node in enumerate(nodes, start=1)}}
        found = [number[node.parent] for node in nodes if node.parent is not None]
        if found != list(parents):
            parents = found
    above = (root, *nodes)
    return Window(
        token_ids=tuple([node.token_id for node in nodes]),
        parents=() if isinstance(parents, range) else tuple(parents),
        multiplicities=tuple([node.multiplicity for node in nodes]) if with_multiplicities else (),
        distributions={
            parent: distribution
            for parent in dict.fromkeys(parents)
            if (distribution := above[parent].distribution) is not None
        },
    )


def put_child(parent: Node, child: Node, *, leads: bool) -> None:
    """Add a last child; a leading one goes after the last child that leads."""
    child.leads = leads
    siblings = parent.children
    if not leads or not siblings or siblings[-1].leads:
        siblings.append(child)
    else:
        siblings.insert(sum(one.leads for one in siblings), child)


# Place of a proposal's token: a number of committed tokens, a node, or None for nowhere.
_Place = int | Node | None


class TokenTree:
    """Committed tokens, and the candidates after them in order of arrival.

    A proposal is placed by content: under the node whose prefix has the proposal's length and hash.
    So it may arrive at any time, and more than once. Candidates that are being verified stay.
    """

    __slots__ = (
        "_apart",
        "_by_hash",
        "_counts_paths",
        "_hashes",
        "_most_draws",
        "_nodes",
        "_num_prompt",
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
        prompt_hash: int | None = None,
        chain: bool = True,
        verified_width: int | None = None,
        merged: bool = False,
        most_draws: int = MAX_SIBLINGS,
        counts_paths: bool = False,
    ) -> None:
        """`prompt_hash`: given by the caller, since hashing a long prompt takes milliseconds.

        `chain`: the tree has at most one branch. Where a proposal disagrees, its tokens replace
        those held, because the drafter goes on from them. `verified_width`: some candidates are
        held for other outcomes; a step verifies the likeliest of all, at most this many children of
        a node. With 1 it verifies the chain of first children. None: a step verifies what came
        first. `merged`: one drafter of each kind proposes; their candidates are verified side by
        side, so a step is that much wider. `most_draws`: the most granted draws under a node, for
        draws that come with their distribution. `counts_paths`: draws belong to paths (k-SEQ), so
        no more leave a node than reach it.
        """
        self.chain = chain
        self.verified_width = verified_width
        self._rank_chances = RANK_CHANCES
        if merged and verified_width is not None:
            self.verified_width = verified_width + MAX_MERGED - 1
            self._rank_chances = MERGED_CHANCES
        self._most_draws = most_draws
        self._counts_paths = counts_paths
        self.repeats = 0
        """Proposed tokens that were already held as candidates."""
        self.token_ids = list(prompt_token_ids)
        # Hashes of the prompt and of each longer prefix. Drafters get the prompt as a whole.
        self._num_prompt = len(self.token_ids)
        self._hashes = [hash_prefix(self.token_ids) if prompt_hash is None else prompt_hash]
        # The last committed token, and all candidates under it, each after its parent.
        self.root = Node(self.token_ids[-1], len(self.token_ids), self._hashes[-1])
        self._nodes: list[Node] = []
        self._pinned: list[Node] = []
        # Whether the pinned candidates have left the tree, since another drafter took over.
        self._apart = False
        self._by_hash: dict[int, Node] = {self.root.prefix_hash: self.root}

    @property
    def num_committed(self) -> int:
        return len(self.token_ids)

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
        return len(self._pinned)

    def attach(
        self, proposal: Proposal, until_position: int, max_nodes: int, leads: bool = True
    ) -> bool:
        """Place a proposal: skip tokens that are held already, take the rest.

        Takes no token at or beyond `until_position` and holds at most `max_nodes` candidates.
        `leads`: the sequence's first drafter proposes. Returns False, and takes nothing, if the
        proposal does not continue this text. Raises ProtocolError, and takes nothing, if it
        contradicts what is held of the same draws.
        """
        token_ids, length = proposal.token_ids, proposal.base_length
        is_one = len(token_ids) == 1 and not (proposal.multiplicities or proposal.distributions)
        leaf = self._by_hash.get(proposal.base_hash) if is_one else None
        if (
            leaf is not None
            and leaf.length == length < until_position
            and not leaf.children
            and len(self._nodes) < max_nodes
        ):
            self._add_child(leaf, token_ids[0], leads)  # The common case.
            return True
        base = self._place_of_base(length, proposal.base_hash)
        parents = proposal.parents
        if base is None or (self.chain and parents and parents != tuple(range(len(parents)))):
            return False
        if is_one:
            return self._after(base, token_ids[0], (), until_position, max_nodes, leads) is not None
        if proposal.distributions and not self.chain:
            self._check_draws(proposal, base)
        places: list[_Place] = [base]
        used: set[int] = set()
        for index, token_id in enumerate(token_ids):
            above = places[parents[index] if parents else index]
            place = self._after(above, token_id, used, until_position, max_nodes, leads)
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

    def force(self, token_ids: Sequence[int], *, with_probs: bool) -> None:
        """Hold these tokens after the committed ones: no others are possible there.

        They stop where another candidate is held. `with_probs`: with the distribution of a draw
        that has one outcome.
        """
        node = self.root
        for token_id in token_ids:
            child = self._held_child(node, token_id, ())
            if child is None:
                if node.children:
                    return
                child = self._add_child(node, token_id, leads=True)
                if with_probs:
                    node.distribution = SparseProbs(
                        np.array([token_id], dtype=np.int64), np.ones(1, dtype=np.float32)
                    )
            node = child

    def path_to(self, length: int, prefix_hash: int) -> list[int] | None:
        """The candidates up to the one whose prefix has this length and hash; None: not held."""
        place = self._place_of_base(length, prefix_hash)
        if not isinstance(place, Node):
            return None
        path: list[int] = []
        while place.parent is not None:
            path.append(place.token_id)
            place = place.parent
        return path[::-1]

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
        root = self.root
        root.children, root.distribution = [], None
        self._nodes, self._by_hash = [], {root.prefix_hash: root}
        self._apart = bool(self._pinned)

    def commit(self, accepted: Sequence[int], token_id: int | None) -> tuple[int, ...]:
        """Commit a path of pinned candidates and the token after them. Returns the new tokens.

        Candidates that continue them stay. `token_id` None: commit the path alone.
        """
        path = [self._pinned[index] for index in accepted]
        assert [node.parent for node in path] == [self.root, *path][: len(path)], "no path"
        after = () if token_id is None else (token_id,)
        if self._apart:  # Candidates that continue them are other nodes than the pinned ones.
            return self._go_along([], (*[node.token_id for node in path], *after))
        return self._go_along(path, after)

    def advance(self, token_ids: Sequence[int]) -> None:
        """Commit tokens without regard to what was pinned. Candidates that continue them stay."""
        self._go_along([], token_ids)

    def check_integrity(self) -> None:
        """Assert that hashes match the tokens and that the tree is consistent."""
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
        assert self._apart or all(id(node) in seen for node in self._pinned)
        if self.verified_width is not None:
            for limit in (1, 4, MAX_WINDOW):
                assert self.num_verifiable(limit) == len(self._choose(limit)), "counted otherwise"
        assert not self.chain or all(len(n.children) <= 1 for n in [self.root, *self._nodes])

    def _place_of_base(self, length: int, prefix_hash: int) -> _Place:
        if length < len(self.token_ids):
            place = length - self._num_prompt
            return length if place >= 0 and self._hashes[place] == prefix_hash else None
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
        """The place of `token_id` after `parent`: a committed token or a child.

        It is not a node whose id is in `used`. A missing child is made if there is room for it.
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
        child = self._held_child(parent, token_id, used)
        if child is not None:
            if leads and not child.leads:
                siblings.remove(child)
                put_child(parent, child, leads=True)
            self.repeats += 1
            return child
        if siblings and self.chain:
            if not self._apart and any(node.parent is parent for node in self._pinned):
                return None
            self._cut_chain(siblings[0])
        if len(self._nodes) >= max_nodes or len(parent.children) >= MAX_SIBLINGS:
            return None
        return self._add_child(parent, token_id, leads)

    def _check_draws(self, proposal: Proposal, base: _Place) -> None:
        """Raise ProtocolError if draws contradict those that are held.

        All draws under a node have one distribution and are at most as many as granted. Of k-SEQ's
        paths no more leave a node than reach it. The proposal by itself was checked before.
        """
        token_ids, parents = proposal.token_ids, proposal.parents or range(len(proposal.token_ids))
        counts = proposal.multiplicities or (1,) * len(token_ids)
        places: list[_Place] = [base]
        new: dict[Node, int] = {}
        used: set[int] = set()
        for token_id, parent, count in zip(token_ids, parents, counts, strict=True):
            above, place = places[parent], None
            if isinstance(above, int) and self.token_ids[above] == token_id:
                place = self.root if above + 1 == len(self.token_ids) else above + 1
            elif isinstance(above, Node):
                place = self._held_child(above, token_id, used)
                if place is None:
                    new[above] = new.get(above, 0) + count
                else:
                    used.add(id(place))
                    if place.multiplicity != count:
                        raise ProtocolError(
                            f"expected {place.multiplicity} paths through token {token_id}, as "
                            f"sent before, got {count}"
                        )
            places.append(place)
        for number, told in proposal.distributions.items():
            place = places[number]
            if isinstance(place, Node):
                before = place.distribution
                if before is not None and not before.equals(told):
                    raise ProtocolError(
                        "expected one distribution for all draws after a prefix, got one that "
                        "differs from the one sent before"
                    )
        for above, count in new.items():
            most = self._most_draws
            if self._counts_paths and above is not self.root:
                most = above.multiplicity
            total = count + sum(one.multiplicity for one in above.children)
            if total > most:
                raise ProtocolError(
                    f"expected at most {most} draws after a prefix, as granted, got {total}"
                )

    def _held_child(self, parent: Node, token_id: int, used: Collection[int]) -> Node | None:
        """The first child with this token whose id is not in `used`; None: there is none."""
        for child in parent.children:
            if child.token_id == token_id and id(child) not in used:
                return child
        return None

    def _add_child(self, parent: Node, token_id: int, leads: bool) -> Node:
        prefix_hash = extend_hash(parent.prefix_hash, token_id)
        node = Node(token_id, parent.length + 1, prefix_hash, parent)
        put_child(parent, node, leads=leads)
        self._nodes.append(node)
        self._by_hash.setdefault(prefix_hash, node)
        return node

    def _go_along(self, path: list[Node], token_ids: Sequence[int]) -> tuple[int, ...]:
        """Commit these candidates and the tokens after them. Returns all of them."""
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
        """Keep only `root`, which is held already, and the candidates under it.

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
        # Of nodes with equal prefixes, keep the first; in any case keep the root.
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

    def _choose(self, limit: int) -> list[Node]:
        """The candidates that a step verifies, each after its parent."""
        if self.verified_width is None:
            return self._nodes[:limit]
        return likeliest(
            self.root, limit, width=self.verified_width, rank_chances=self._rank_chances
        )

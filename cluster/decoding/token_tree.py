"""The tokens of one sequence: what is committed, and the tree of candidates that continue it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cluster.decoding.candidates import Candidates
from cluster.decoding.events import Proposal
from cluster.decoding.windows import Node, put_child
from paceline.prefix_hash import extend_hash, hash_prefix

# Where a token of a proposal lies: a number of committed tokens, a node, or nowhere.
_Place = int | Node | None


class TokenTree(Candidates):
    """Committed tokens, and the candidates beyond them in the order in which they arrived.

    Proposals are placed by content: under the node whose prefix has the proposal's length and
    hash. So it does not matter when a proposal arrives, or how often. With `chain` there is one
    branch at most: where a proposal disagrees, the newer tokens win, since they are what the
    drafter goes on from, but for those that are being verified.
    """

    __slots__ = ("_hashes", "_num_prompt", "repeats", "token_ids")

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        *,
        prompt_hash: int | None = None,
        chain: bool = True,
        verified_width: int | None = None,
        merged: bool = False,
    ) -> None:
        """`prompt_hash`: of a long prompt it takes milliseconds, so a caller may bring it."""
        self.repeats = 0
        """Tokens of proposals that were held already as candidates."""
        self.token_ids = list(prompt_token_ids)
        # Of the prompt and of each longer prefix: drafters are told all of the prompt at once.
        self._num_prompt = len(self.token_ids)
        self._hashes = [hash_prefix(self.token_ids) if prompt_hash is None else prompt_hash]
        root = Node(self.token_ids[-1], len(self.token_ids), self._hashes[-1])
        super().__init__(root, chain=chain, verified_width=verified_width, merged=merged)

    @property
    def num_committed(self) -> int:
        """Committed tokens, the prompt included."""
        return len(self.token_ids)

    def attach(
        self, proposal: Proposal, until_position: int, max_nodes: int, leads: bool = True
    ) -> bool:
        """Place a proposal: skip what is held already, take the rest.

        Takes no token at or beyond `until_position` and holds at most `max_nodes` candidates.
        Returns False, and takes nothing, when the proposal continues something else than this.
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
            self._add_child(leaf, token_ids[0], leads)  # as most are
            return True
        base = self._place_of_base(length, proposal.base_hash)
        parents = proposal.parents
        if base is None or (self.chain and parents and parents != tuple(range(len(parents)))):
            return False
        if is_one:
            return self._after(base, token_ids[0], (), until_position, max_nodes, leads) is not None
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

    def check_integrity(self) -> None:
        """Assert that hashes fit the tokens and the tree hangs together."""
        assert self._hashes[-1] == hash_prefix(self.token_ids) == self.root.prefix_hash
        assert self.root.length == len(self.token_ids)
        super().check_integrity()

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
        return self._add_child(parent, token_id, leads)

    def _add_child(self, parent: Node, token_id: int, leads: bool) -> Node:
        prefix_hash = extend_hash(parent.prefix_hash, token_id)
        node = Node(token_id, parent.length + 1, prefix_hash, parent)
        put_child(parent, node, leads=leads)
        self._nodes.append(node)
        self._by_hash.setdefault(prefix_hash, node)
        return node

"""The slots that hold the KV of a tree on a drafter's device.

The committed tokens take the first slots of a sequence, one per position. After them each node that
was fed has a slot, in the order in which the nodes were fed. A node that was never fed has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from workers.drafting.tree import ROOT, DraftTree, Kept
from workers.engine.local_cache import LocalSequence
from workers.engine.slices import Slice


class OwnText(Protocol):
    """A sequence's committed text in the tokens of the drafter's model."""

    @property
    def token_ids(self) -> Sequence[int]:
        """All of them."""

    @property
    def num_final(self) -> int:
        """The number of tokens, from the first on, that stay whatever text follows."""

    def of(self, token_ids: Sequence[int]) -> Sequence[int]:
        """The model's tokens for drafted tokens."""

    def commit(self, tree: DraftTree, kept: Kept) -> int:
        """Append what an outcome committed. Returns how many tokens from the first on stay."""


class SameText:
    """The text of a model with the target's vocabulary."""

    def __init__(self, tree: DraftTree) -> None:
        self.token_ids = tree.committed

    @property
    def num_final(self) -> int:
        return len(self.token_ids)

    def of(self, token_ids: Sequence[int]) -> Sequence[int]:
        return token_ids

    def commit(self, tree: DraftTree, kept: Kept) -> int:
        return len(self.token_ids)


class TreeKv:
    """The slots of one sequence. The nodes' numbers are those of its DraftTree."""

    def __init__(self, sequence: LocalSequence, text: OwnText) -> None:
        self._sequence = sequence
        self.text = text
        self._nodes: list[int] = []
        # As in engine.Slice: 0 for the root, j + 1 for the node in tree slot j.
        self._parents: list[int] = []

    @property
    def num_committed(self) -> int:
        """The number of committed tokens that have a slot, whether or not KV is stored there."""
        return len(self._sequence) - len(self._nodes)

    @property
    def block_table(self) -> Sequence[int]:
        return self._sequence.block_table

    @property
    def missing(self) -> int:
        """The number of committed tokens that have no KV yet."""
        return len(self.text.token_ids) - min(self._sequence.num_stored, self.num_committed)

    def forget_unstored(self) -> None:
        """Remove the slots that a failed pass was to fill."""
        stored = max(self._sequence.num_stored - self.num_committed, 0)
        self._sequence.truncate_to(self.num_committed + stored)
        del self._nodes[stored:]
        del self._parents[stored:]

    def forget_root(self) -> None:
        """Drop the KV of the last committed token, so that it is fed once more for its logits."""
        assert not self._nodes
        self._sequence.truncate_to(self.num_committed - 1)

    def adopt(self) -> None:
        """Use KV that other sequences of its tenant have stored for its next committed tokens."""
        assert not self._nodes
        self._sequence.adopt(final_tokens(self.text))

    def offer(self) -> None:
        """Let other sequences of its tenant use the KV of its committed tokens."""
        # Except the last token: after forget_root it is fed once more.
        self._sequence.offer(min(self.num_committed - 1, self.text.num_final))

    def committed_slice(self, *, limit: int | None) -> Slice:
        """The slice that feeds committed tokens, at most `limit` of them.

        It asks for the root's logits if it reaches the root. Raises OverloadedError.
        """
        assert not self._nodes, "nodes were drafted before their root was fed"
        self._sequence.extend(self.text.token_ids[self.num_committed :])
        return self._sequence.pending_slice(limit=limit)

    def node_slice(self, tree: DraftTree, nodes: Sequence[int]) -> Slice:
        """The slice that feeds nodes whose ancestors were fed. Raises OverloadedError."""
        self._sequence.extend(self.text.of([tree.tokens[node] for node in nodes]))
        slot_of = {ROOT: 0} | {node: slot + 1 for slot, node in enumerate(self._nodes)}
        for node in nodes:
            self._parents.append(slot_of[tree.parents[node]])
            self._nodes.append(node)
            slot_of[node] = len(self._nodes)
        plain = self._sequence.pending_slice(num_logits=len(nodes))
        if self._parents == list(range(len(self._parents))):
            return plain
        return Slice(
            plain.block_table,
            plain.start,
            plain.token_ids,
            plain.num_logits,
            tree_start=self.num_committed,
            parents=tuple(self._parents),
        )

    def mark_stored(self, count: int) -> None:
        self._sequence.mark_stored(count)

    def moves(self, kept: Kept) -> list[tuple[int, int]]:
        """The copies (source slot, target slot) that move the KV of kept nodes to their new slots.

        Make them in this order: each target is then free, or its KV was copied already.
        """
        first = self.num_committed
        return [
            (first + source, first + target)
            for target, source in enumerate(self._slots_of(kept))
            if source != target
        ]

    def keep(self, kept: Kept) -> None:
        """Note that the moves were made, and forget the slots beyond them."""
        first = self.num_committed
        slots = self._slots_of(kept)
        number_of = {old: number for number, old in enumerate(kept.nodes, start=1)}
        for target, source in enumerate(slots):
            if source != target:
                self._sequence.mark_moved(first + target)
                break
        tokens = self._sequence.token_ids
        tokens[first:] = [tokens[first + slot] for slot in slots]
        self._sequence.truncate_to(first + len(slots))
        self._nodes = [
            number_of[self._nodes[slot]] for slot in slots if self._nodes[slot] in number_of
        ]
        on_path = len(slots) - len(self._nodes)
        place = {slot: index for index, slot in enumerate(slots)}
        self._parents = [place[self._parents[slot] - 1] + 1 - on_path for slot in slots[on_path:]]

    def commit(self, tree: DraftTree, kept: Kept) -> None:
        """Append the committed tokens to the text, after `keep`. Forget slots of other tokens."""
        first, stored = self.text.commit(tree, kept), self._sequence.token_ids
        text = self.text.token_ids
        if self._nodes or first >= len(stored):
            return
        most = min(len(stored), len(text))
        same = next((at for at in range(first, most) if stored[at] != text[at]), most)
        self._sequence.truncate_to(same)

    def _slots_of(self, kept: Kept) -> list[int]:
        """The tree slots that stay, ascending; those of the committed path come first."""
        wanted = {*kept.path, *kept.nodes}
        return [slot for slot, node in enumerate(self._nodes) if node in wanted]

    def check_integrity(self, tree: DraftTree) -> None:
        tokens = self._sequence.token_ids
        first = self.num_committed
        text = self.text.token_ids
        assert tokens[:first] == list(text[:first]), "KV is of other tokens than the text"
        assert not self._nodes or first == len(text)
        drafted = self.text.of([tree.tokens[node] for node in self._nodes])
        assert tokens[first:] == list(drafted), "KV of other nodes"
        above = [ROOT, *self._nodes]
        assert [above[p] for p in self._parents] == [tree.parents[node] for node in self._nodes]


def final_tokens(text: OwnText) -> Sequence[int]:
    """The tokens of a text up to the one after the last that stays, for LocalSequence.adopt."""
    return text.token_ids[: text.num_final + 1]

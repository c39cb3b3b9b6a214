"""One sequence on several target groups (DSI: Timor et al. 2024, arXiv 2405.14105).

Each group that serves a sequence keeps KV of its own. A step there feeds the committed tokens that
it has not seen, then the candidates from the last committed token on: those that other groups are
verifying at this moment as well as newer ones. So every verdict stands by itself: it tells the
tokens after the prefix that was committed when its step was sent, whichever group answers first,
late, or never. Under the rule `coupled` the token at a position is a function of its prefix
alone, so two verdicts that speak of the same position agree, and what the first one said is
committed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cluster.decoding.counts import CountedVerdict, Foresight
from cluster.decoding.instructions import Slice
from cluster.decoding.token_tree import TokenTree


@dataclass(frozen=True, slots=True)
class Told:
    """What a verdict on a slice brings now: new tokens, and up to where the group's KV is right."""

    token_ids: tuple[int, ...]
    kv_length: int
    window: int
    accepted: int

    def counted(self, kept: int, foresight: Foresight) -> CountedVerdict:
        """As it is counted, where the sequence's end `kept` so many of the new tokens.

        Only what was not known before counts as accepted; a step whose candidates stood on tokens
        that turned out wrong was wasted.
        """
        accepted = min(self.accepted, kept)
        if kept < len(self.token_ids):
            return CountedVerdict(self.window, self.window, accepted, accepted, kept, foresight)
        tried = min(self.window, accepted + 1) if self.token_ids else 0
        return CountedVerdict(self.window, self.window, tried, accepted, kept, foresight)


def told_by(tree: TokenTree, part: Slice, num_accepted: int, token_id: int) -> Told:
    """Read a verdict on a chain by what is committed by now."""
    base = part.start + len(part.token_ids) - part.window
    path = (*part.token_ids[: len(part.token_ids) - part.window + num_accepted], token_id)
    known = tree.token_ids[part.start :]
    agrees = list(path[: len(known)]) == known[: len(path)]
    new = path[len(known) :] if agrees else ()
    after = [*known, *new]
    pairs = zip(part.token_ids, after, strict=False)
    right = next((i for i, (fed, true) in enumerate(pairs) if fed != true), len(part.token_ids))
    num_known = tree.num_committed - base
    return Told(
        token_ids=new,
        # The last committed token is always fed again, for its logits.
        kv_length=min(part.start + min(right, len(after)), part.start + len(after) - 1),
        window=max(0, part.window - num_known) if agrees else part.window,
        accepted=max(0, num_accepted - num_known) if agrees else 0,
    )


def num_verifying(tree: TokenTree, in_flight: Iterable[Slice]) -> int | None:
    """How many of the candidates that are held these slices verify, from the root on.

    None: none of them could still bring a token.
    """
    reaches = (_reach(tree, part) for part in in_flight if part.verdict)
    return max((reach for reach in reaches if reach is not None), default=None)


def _reach(tree: TokenTree, part: Slice) -> int | None:
    """How many candidates of the held chain a slice has; None: it is behind, or of another text."""
    first = tree.num_committed - part.start
    if first > len(part.token_ids) or list(part.token_ids[:first]) != tree.token_ids[part.start :]:
        return None
    node = tree.root
    for depth, token_id in enumerate(part.token_ids[first:]):
        if not node.children or node.children[0].token_id != token_id:
            return depth
        node = node.children[0]
    return len(part.token_ids) - first

"""One sequence on several target groups (DSI: Timor et al. 2024, arXiv 2405.14105).

Each group that serves a sequence keeps KV of its own. A step there feeds the committed tokens that
the group has not seen, then the candidates after the last committed token: those that other groups
are verifying and newer ones. So a verdict does not depend on other groups, even if they answer late
or never. It says which tokens follow the prefix that was committed when its step was sent.
Under the rule `coupled` the token at a position is a function of its prefix alone. So two verdicts
on the same position agree, and the first one commits it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cluster.decoding.counts import CountedVerdict, Foresight
from cluster.decoding.instructions import Slice
from cluster.decoding.token_tree import TokenTree


@dataclass(frozen=True, slots=True)
class Told:
    """What a verdict adds to the tokens committed now, and how much of the group's KV is right.

    `window`: candidates of the slice that were not decided yet. `accepted`: those of them accepted.
    """

    token_ids: tuple[int, ...]
    kv_length: int
    window: int
    accepted: int

    def counted(self, kept: int, foresight: Foresight) -> CountedVerdict:
        """The verdict as it is counted. `kept`: new tokens up to the end of the sequence.

        Only tokens that were not known before count as accepted. A step whose candidates followed
        tokens that turned out wrong was wasted.
        """
        accepted = min(self.accepted, kept)
        if kept < len(self.token_ids):
            return CountedVerdict(self.window, self.window, accepted, accepted, kept, foresight)
        tried = min(self.window, accepted + 1) if self.token_ids else 0
        return CountedVerdict(self.window, self.window, tried, accepted, kept, foresight)


def told_by(tree: TokenTree, part: Slice, num_accepted: int, token_id: int) -> Told:
    """Compare a verdict on a chain with the tokens that are committed by now."""
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
    """How many of the held candidates these slices verify, counted from the root.

    None: no slice can still bring a token.
    """
    reaches = (_reach(tree, part) for part in in_flight if part.verdict)
    return max((reach for reach in reaches if reach is not None), default=None)


def _reach(tree: TokenTree, part: Slice) -> int | None:
    """Candidates of the held chain that a slice has; None: it lacks tokens or has other ones."""
    first = tree.num_committed - part.start
    if first > len(part.token_ids) or list(part.token_ids[:first]) != tree.token_ids[part.start :]:
        return None
    node = tree.root
    for depth, token_id in enumerate(part.token_ids[first:]):
        if not node.children or node.children[0].token_id != token_id:
            return depth
        node = node.children[0]
    return len(part.token_ids) - first

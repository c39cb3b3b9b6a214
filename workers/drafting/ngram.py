"""Prompt lookup: what followed the longest matching suffix before (ALGORITHMS.md section 6)."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.rules import Rule
from workers.drafting.proposer import Draft, DrafterInfo, Pass, TopTokens
from workers.drafting.tree import DraftTree, Kept, NewNodes

MAX_SUFFIX = 4
MAX_PROPOSED = 1024
ANY_POSITION = (1 << 32) - 1


class NgramProposer:
    """Copies: the suffix of a sequence (at most 4 tokens, the longest that occurred) is looked up
    in the committed tokens, newest occurrence first, and what followed it is proposed up to the
    grant.
    """

    def __init__(self) -> None:
        self._indices: dict[DraftTree, _SuffixIndex] = {}

    @property
    def info(self) -> DrafterInfo:
        rules = frozenset({Rule.COUPLED, Rule.ONE_HOT})
        return DrafterInfo("ngram", "", 0, b"", ANY_POSITION, rules)

    def open(self, tree: DraftTree) -> None:
        index = _SuffixIndex()
        index.grow(tree)
        self._indices[tree] = index

    def close(self, tree: DraftTree) -> None:
        del self._indices[tree]

    def committed(self, tree: DraftTree, kept: Kept, top_tokens: Sequence[TopTokens]) -> None:
        self._indices[tree].grow(tree)

    def run_pass(self, trees: Sequence[DraftTree], *, pass_ms: float) -> Pass:
        result = Pass(took_part=list(trees))
        for tree in trees:
            result.drafts.append(_lookup(tree, self._indices[tree]))
        return result

    def check_integrity(self, trees: Sequence[DraftTree]) -> None:
        assert set(self._indices) == set(trees), "an index was leaked or lost"


class _SuffixIndex:
    """Where each run of 1 to 4 committed tokens was last followed by something.

    Maps the run to the position of what followed. Run-ahead is not indexed, so nothing is ever
    taken back.
    """

    def __init__(self) -> None:
        self._followers: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def grow(self, tree: DraftTree) -> None:
        """Index the tokens that were committed since."""
        token_ids = tree.committed
        for position in range(self._num_indexed, tree.num_committed):
            for length in range(1, min(MAX_SUFFIX, position) + 1):
                self._followers[tuple(token_ids[position - length : position])] = position
        self._num_indexed = tree.num_committed

    def follower(self, suffix: Sequence[int]) -> int | None:
        """The position of what followed the longest known end of `suffix`, most recently."""
        for first in range(len(suffix)):
            position = self._followers.get(tuple(suffix[first:]))
            if position is not None:
                return position
        return None


def _lookup(tree: DraftTree, index: _SuffixIndex) -> Draft:
    if tree.chain_room == 0:
        return Draft(tree, NewNodes(), grant_used=True)
    text = tree.prefix(tree.end)
    position = index.follower(text[-MAX_SUFFIX:])
    if position is None:
        return Draft(tree, NewNodes(), last=True)
    # The copy may run into what it has just written: a loop in the text goes on as a loop.
    length = len(text)
    for source in range(position, position + min(tree.chain_room, MAX_PROPOSED)):
        text.append(text[source])
        if text[-1] in tree.spec.end_token_ids:
            break
    return Draft(tree, NewNodes(text[length:]))

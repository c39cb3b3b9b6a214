"""Prompt lookup: proposes what followed the longest earlier match of the text's suffix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.rules import MAX_PROPOSED
from workers.drafting.branches import merge_branches, unknown_part
from workers.drafting.nodes import ROOT, Kept, NewNodes
from workers.drafting.proposer import ANY_POSITION, Draft, DrafterInfo, Pass, TakesNoTime, TopTokens
from workers.drafting.tree import DraftTree
from workers.verification.rule import CandidateKind, rules_exact_for

MAX_SUFFIX = 4
MAX_REMEMBERED = 16
"""Maximum number of occurrences that are remembered of a run, the newest ones."""


class NgramProposer(TakesNoTime):
    """Copies from the committed tokens what followed an earlier occurrence of the text's suffix.

    The suffix is the longest of 1 to 4 tokens that occurred before. The newest occurrence comes
    first, and is copied up to the grant. In a tree, other occurrences and those of shorter suffixes
    give further branches.
    """

    def __init__(self) -> None:
        self._indices: dict[DraftTree, _SuffixIndex] = {}

    @property
    def info(self) -> DrafterInfo:
        rules = rules_exact_for(CandidateKind.DETERMINISTIC)
        return DrafterInfo("ngram", "", 0, b"", ANY_POSITION, rules)

    def open(self, tree: DraftTree) -> None:
        index = self._indices[tree] = _SuffixIndex()
        index.grow(tree, tree.num_settled)

    def settle(self, tree: DraftTree, count: int) -> None:
        self._indices[tree].grow(tree, count)

    def close(self, tree: DraftTree) -> None:
        del self._indices[tree]

    def committed(self, tree: DraftTree, kept: Kept, top_tokens: Sequence[TopTokens]) -> None:
        self._indices[tree].grow(tree, len(kept.token_ids))

    def run_pass(self, trees: Sequence[DraftTree], *, pass_ms: float) -> Pass:
        result = Pass(took_part=list(trees))
        for tree in trees:
            forked = tree.grant.branches > 1 or not tree.is_chain
            draft = _copy_branches if forked else _copy_chain
            try:
                result.drafts.append(draft(tree, self._indices[tree]))
            except Exception as error:
                result.fail(tree, error)
        return result

    def check_integrity(self, trees: Sequence[DraftTree]) -> None:
        assert set(self._indices) == set(trees), "an index was leaked or lost"


class _SuffixIndex:
    """Where each run of 1 to 4 committed tokens was followed by another token.

    Maps the run to the positions of the tokens after it, the newest last. Only committed tokens are
    indexed, so no entry is ever taken back.
    """

    def __init__(self) -> None:
        self._followers: dict[tuple[int, ...], list[int]] = {}
        self._num_indexed = 0

    def grow(self, tree: DraftTree, count: int) -> None:
        """Index the next `count` committed tokens, or as many as there are."""
        token_ids, followers = tree.committed, self._followers
        end = min(self._num_indexed + count, tree.num_committed)
        for position in range(self._num_indexed, end):
            run = tuple(token_ids[max(0, position - MAX_SUFFIX) : position])
            for first in range(len(run)):
                positions = followers.get(run[first:])
                if positions is None:
                    followers[run[first:]] = [position]
                    continue
                positions.append(position)
                if len(positions) > MAX_REMEMBERED:
                    del positions[0]
        self._num_indexed = end

    def followers(self, suffix: Sequence[int]) -> Iterator[int]:
        """The positions after earlier occurrences of the ends of `suffix`.

        Longer ends come first, then newer occurrences. A position comes again if a shorter end
        matches there too.
        """
        for first in range(len(suffix)):
            yield from reversed(self._followers.get(tuple(suffix[first:]), ()))


def _copy_chain(tree: DraftTree, index: _SuffixIndex) -> Draft:
    text = tree.prefix(tree.end)
    position = next(index.followers(text[-MAX_SUFFIX:]), None)
    if position is None:
        return Draft(tree, NewNodes(), last=True)
    copied = NewNodes(_copy(tree, text, position, tree.chain_room))
    # A chain cannot begin branches. Without `grant_used`, a grant with `fan_out` would ask again.
    return Draft(tree, copied, grant_used=tree.grant.fan_out > 0)


def _copy_branches(tree: DraftTree, index: _SuffixIndex) -> Draft:
    text, room = tree.committed, min(tree.room(ROOT), tree.nodes_left)
    positions = dict.fromkeys(index.followers(text[-MAX_SUFFIX:]))
    paths = (_copy(tree, text, position, room) for position in positions)
    nodes = merge_branches(paths, branches=tree.grant.branches, max_nodes=tree.nodes_left)
    new = unknown_part(tree, *nodes)
    return Draft(tree, new, last=not positions, grant_used=True)


def _copy(tree: DraftTree, text: Sequence[int], position: int, count: int) -> list[int]:
    """At most `count` tokens from `position` on, up to an end token.

    The copy may continue into tokens that it has just written: a loop in the text goes on as a
    loop.
    """
    copied: list[int] = []
    for place in range(min(count, MAX_PROPOSED)):
        token_id = text[position + place % (len(text) - position)]
        copied.append(token_id)
        if token_id in tree.spec.end_token_ids:
            break
    return copied

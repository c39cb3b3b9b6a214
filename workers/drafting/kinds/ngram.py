"""Prompt lookup: finds an earlier occurrence of the text's last tokens and copies what followed."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

from workers.drafting.kind import (
    DRAFTERS,
    ROOT,
    CandidateKind,
    Draft,
    DrafterInfo,
    DrafterKind,
    DrafterOptions,
    DraftTree,
    Kept,
    NewNodes,
    TakesNoTime,
    TopTokens,
)

MAX_SUFFIX = 4
MAX_REMEMBERED = 16
"""Maximum number of occurrences of a run that are remembered. The newest ones are kept."""

_NEXT_BRANCH = 0.5
"""Assumed probability of a guess, as a multiple of that of the guess before it."""
_NEXT_TOKEN = 0.8
"""Assumed probability that a guess which was right up to one token is right at the next one."""


class NgramProposer(TakesNoTime):
    """Copies from the committed tokens what followed an earlier occurrence of the text's suffix.

    The suffix is the longest one of 1 to 4 tokens that occurred before. A chain copies what
    followed its newest occurrence, up to the grant. In a tree, older occurrences and those of
    shorter suffixes give further branches.
    """

    def __init__(self) -> None:
        self._indices: dict[DraftTree, _SuffixIndex] = {}

    @property
    def info(self) -> DrafterInfo:
        return DrafterInfo(NGRAM.name, NGRAM.rules)

    def open(self, tree: DraftTree) -> None:
        index = self._indices[tree] = _SuffixIndex()
        index.grow(tree, tree.num_settled)

    def settle(self, tree: DraftTree, count: int) -> None:
        self._indices[tree].grow(tree, count)

    def close(self, tree: DraftTree) -> None:
        del self._indices[tree]

    def committed(self, tree: DraftTree, kept: Kept, top_tokens: Sequence[TopTokens]) -> None:
        self._indices[tree].grow(tree, len(kept.token_ids))

    def draft(self, tree: DraftTree) -> Draft:
        forked = tree.grant.branches > 1 or not tree.is_chain
        return (_copy_branches if forked else _copy_chain)(tree, self._indices[tree])

    def check_integrity(self, trees: Sequence[DraftTree]) -> None:
        assert set(self._indices) == set(trees), "an index was leaked or lost"


class _SuffixIndex:
    """Maps each run of 1 to 4 committed tokens to the positions after it, the newest last.

    Only committed tokens are indexed, so an index never has to be rolled back.
    """

    def __init__(self) -> None:
        self._followers: dict[tuple[int, ...], list[int]] = {}
        self._num_indexed = 0

    def grow(self, tree: DraftTree, count: int) -> None:
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
        """The positions after earlier occurrences of `suffix`, or of its last 3, 2 or 1 tokens.

        Longer matches come first, then newer occurrences. A position is repeated if a shorter
        match ends there too.
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
    new = tree.unknown_part(*nodes)
    return Draft(tree, new, last=not positions, grant_used=True)


def merge_branches(
    guesses: Iterable[Sequence[int]], *, branches: int, max_nodes: int
) -> tuple[list[int], list[int]]:
    """A tree of the first `branches` different guesses. `guesses`: the likeliest first.

    Returns token ids and parents as on the wire, in descending order of assumed probability. At
    most `max_nodes` nodes are kept, the likeliest ones. A guess that is a prefix of an earlier one
    is dropped and does not count.
    """
    chosen: list[Sequence[int]] = []
    for guess in guesses:
        if len(chosen) == branches:
            break
        if not any(list(guess) == list(other[: len(guess)]) for other in chosen):
            chosen.append(guess)
    token_ids: list[int] = []
    parents: list[int] = []
    child_of: dict[tuple[int, int], int] = {}
    # The next token of each guess: minus its assumed probability, the guess's rank, depth, parent.
    edge = [(-(_NEXT_BRANCH**rank), rank, 0, ROOT) for rank in range(len(chosen))]
    while edge and len(token_ids) < max_nodes:
        worth, rank, depth, above = heapq.heappop(edge)
        token_id = chosen[rank][depth]
        node = child_of.get((above, token_id))
        if node is None:
            token_ids.append(token_id)
            parents.append(above)
            node = child_of[above, token_id] = len(token_ids)
        if depth + 1 < len(chosen[rank]):
            heapq.heappush(edge, (worth * _NEXT_TOKEN, rank, depth + 1, node))
    return token_ids, parents


def _copy(tree: DraftTree, text: Sequence[int], position: int, count: int) -> list[int]:
    """At most `count` tokens from `position` on, up to an end token.

    At the end of the text the copy continues with its own first tokens, so that a loop in the text
    is continued as a loop.
    """
    copied: list[int] = []
    for place in range(count):
        token_id = text[position + place % (len(text) - position)]
        copied.append(token_id)
        if token_id in tree.spec.end_token_ids:
            break
    return copied


async def _load(options: DrafterOptions) -> NgramProposer:
    return NgramProposer()


NGRAM = DRAFTERS.add(
    DrafterKind(
        name="ngram",
        help="prompt lookup: copies what followed the last tokens where they occurred before",
        paper="Saxena 2023, prompt lookup decoding",
        load=_load,
        candidates=CandidateKind.DETERMINISTIC,
    )
)

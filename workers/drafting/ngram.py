"""Prompt lookup: what followed the longest matching suffix before (ALGORITHMS.md section 6)."""

from __future__ import annotations

from collections.abc import Sequence

from workers.drafting.path import DraftPath
from workers.drafting.proposer import Draft, DrafterInfo, Pass

MAX_SUFFIX = 4
MAX_PROPOSED = 1024
ANY_POSITION = (1 << 32) - 1


class NgramProposer:
    """Copies: the suffix of a path (at most 4 tokens, the longest that occurred) is looked up in
    the committed tokens, newest occurrence first, and what followed it is proposed up to the grant.
    """

    def __init__(self) -> None:
        self._indices: dict[DraftPath, _SuffixIndex] = {}

    @property
    def info(self) -> DrafterInfo:
        return DrafterInfo("ngram", "", 0, b"", ANY_POSITION)

    def open(self, path: DraftPath) -> None:
        index = _SuffixIndex()
        index.grow(path)
        self._indices[path] = index

    def close(self, path: DraftPath) -> None:
        del self._indices[path]

    def committed(self, path: DraftPath, *, kept: int) -> None:
        self._indices[path].grow(path)

    def run_pass(self, paths: Sequence[DraftPath]) -> Pass:
        result = Pass(took_part=list(paths))
        for path in paths:
            result.drafts.append(_lookup(path, self._indices[path]))
        return result

    def check_integrity(self, paths: Sequence[DraftPath]) -> None:
        assert set(self._indices) == set(paths), "an index was leaked or lost"


class _SuffixIndex:
    """Where each run of 1 to 4 committed tokens was last followed by something.

    Maps the run to the position of what followed. Run-ahead is not indexed, so nothing is ever
    taken back.
    """

    def __init__(self) -> None:
        self._followers: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def grow(self, path: DraftPath) -> None:
        """Index the tokens that were committed since."""
        token_ids = path.token_ids
        for position in range(self._num_indexed, path.num_committed):
            for length in range(1, min(MAX_SUFFIX, position) + 1):
                self._followers[tuple(token_ids[position - length : position])] = position
        self._num_indexed = path.num_committed

    def follower(self, suffix: Sequence[int]) -> int | None:
        """The position of what followed the longest known end of `suffix`, most recently."""
        for first in range(len(suffix)):
            position = self._followers.get(tuple(suffix[first:]))
            if position is not None:
                return position
        return None


def _lookup(path: DraftPath, index: _SuffixIndex) -> Draft:
    position = index.follower(path.token_ids[-MAX_SUFFIX:])
    if position is None:
        return Draft(path, (), last=True)
    # The copy may run into what it has just written: a loop in the text goes on as a loop.
    text = list(path.token_ids)
    length = len(text)
    for source in range(position, position + min(path.room, MAX_PROPOSED)):
        text.append(text[source])
        if text[-1] in path.spec.end_token_ids:
            break
    return Draft(path, text[length:])

"""A structure followed over a text: which tokens may come next, and which are forced.

The interface to a grammar library is `Matcher`; llguidance fills it (grammars.py), and another one
such as xgrammar could. A `Follower` moves one matcher to any prefix of a sequence's output, and to
any path of candidates after it, so that a row of logits gets the mask of its own prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.errors import InternalError


class Matcher(Protocol):
    """A grammar's state after some tokens. Mutable.

    A matcher that cannot go on, because a limit is exceeded, raises InternalError from every method
    from then on.
    """

    def advance(self, token_ids: Sequence[int]) -> int:
        """Take tokens, up to the first one that the grammar refuses. Returns how many."""
        ...

    def retreat(self, count: int) -> None:
        """Take back the last `count` tokens."""
        ...

    def allowed_V(self) -> NDArray[np.bool_]:
        """For each token id, whether it may come next. End tokens may if the text is complete."""
        ...

    def forced(self) -> list[int]:
        """The next tokens, as far as there is only one for each position; often none."""
        ...

    def accepts(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens `advance` would take. Changes nothing."""
        ...


class Follower:
    """A matcher that follows one sequence's output, and candidates after it.

    `begin` returns the matcher of an empty output; it is called once, at the first use.
    `end_token_ids`: nothing is asked after one of them. Methods raise what the matcher raises.
    """

    __slots__ = ("_begin", "_ends", "_matcher", "_num_output", "_path")

    def __init__(self, begin: Callable[[], Matcher], end_token_ids: Collection[int]) -> None:
        self._begin = begin
        self._ends = frozenset(end_token_ids)
        self._matcher: Matcher | None = None
        # What the matcher has taken: output tokens, then a path of candidates.
        self._num_output = 0
        self._path: tuple[int, ...] = ()

    def cut(self, num_output: int) -> None:
        """Output tokens from number `num_output` on are about to change."""
        if num_output < self._num_output:
            self._move_path(())
            assert self._matcher is not None
            self._matcher.retreat(self._num_output - num_output)
            self._num_output = num_output

    def allowed_V(
        self, output: Callable[[int, int], Sequence[int]], num_output: int, path: Sequence[int]
    ) -> NDArray[np.bool_] | None:
        """The tokens that may follow `num_output` output tokens and then `path`.

        `output(first, end)` returns these output tokens. None: nothing will be chosen there,
        because the path is refused or has an end token. Raises InternalError if the output is
        refused.
        """
        if not self._ends.isdisjoint(path):
            return None
        matcher = self._matcher
        if matcher is None:
            matcher = self._matcher = self._begin()
        if num_output != self._num_output:
            self._move_path(())
            self.cut(num_output)
            more = output(self._num_output, num_output)
            taken = matcher.advance(more)
            self._num_output += taken
            if taken < len(more):
                raise InternalError(
                    f"expected output that fits the request's structure, got token {more[taken]} "
                    f"at its place {self._num_output}, which the structure refuses there"
                )
        return matcher.allowed_V() if self._move_path(path) else None

    def _move_path(self, path: Sequence[int]) -> bool:
        """Have the matcher take `path` after the output. Returns whether it took all of it."""
        before = self._path
        kept = 0
        for ours, theirs in zip(before, path, strict=False):
            if ours != theirs:
                break
            kept += 1
        if self._matcher is None or (kept == len(before) == len(path)):
            return True
        if kept < len(before):
            self._matcher.retreat(len(before) - kept)
        self._path = tuple(path[:kept])
        more = path[kept:]
        taken = self._matcher.advance(more) if more else 0
        self._path += tuple(more[:taken])
        return taken == len(more)

"""The tokens before a row of logits, and how often each of them occurs.

Penalties depend on these counts. Counting a text of 32,000 tokens takes milliseconds. So a sequence
keeps its counts from step to step, and a row adds only its own path of candidates.

Shapes: N different token ids of a text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from paceline.errors import InternalError
from workers.verification.structure import Follower

_FIRST_ROOM = 64
"""Initial room for different token ids. It is doubled when it is full."""

_ID, _ALL, _OUTPUT = 0, 1, 2


class TokenCounts:
    """How often each token id occurs in the whole text, and in its output.

    The output is the part after the prompt.
    """

    __slots__ = ("_place_of", "_table_3N")

    def __init__(self) -> None:
        self._place_of: dict[int, int] = {}
        # Token ids, all occurrences, occurrences in the output. The first len(_place_of) columns
        # are used.
        self._table_3N = np.zeros((3, _FIRST_ROOM), dtype=np.int64)

    @property
    def ids_N(self) -> NDArray[np.int64]:
        """The different ids that occur, in no order. A view, valid until the next change."""
        return self._table_3N[_ID, : len(self._place_of)]

    @property
    def outputs_N(self) -> NDArray[np.int64]:
        """How often each of `ids_N` occurs in the output. A view, valid until the next change."""
        return self._table_3N[_OUTPUT, : len(self._place_of)]

    def place_of(self, token_id: int) -> int | None:
        """The index of an id in `ids_N`, or None if it does not occur."""
        return self._place_of.get(token_id)

    def add(self, token_ids: Iterable[int], *, are_output: bool) -> None:
        """Count more tokens."""
        for token_id, count in Counter(token_ids).items():
            place = self._place_of.get(token_id)
            if place is None:
                place = self._place_of[token_id] = len(self._place_of)
                if place == self._table_3N.shape[1]:
                    self._table_3N = np.concatenate((self._table_3N, self._table_3N), axis=1)
                self._table_3N[:, place] = token_id, 0, 0
            self._table_3N[_ALL, place] += count
            if are_output:
                self._table_3N[_OUTPUT, place] += count

    def remove(self, token_ids: Iterable[int], *, are_output: bool) -> None:
        """Subtract the counts of tokens that were added with the same `are_output`."""
        for token_id, count in Counter(token_ids).items():
            place = self._place_of[token_id]
            self._table_3N[_ALL, place] -= count
            if are_output:
                self._table_3N[_OUTPUT, place] -= count
            if self._table_3N[_ALL, place] == 0:
                last = len(self._place_of) - 1
                self._place_of[int(self._table_3N[_ID, last])] = place
                self._table_3N[:, place] = self._table_3N[:, last]
                del self._place_of[token_id]


class CountedText:
    """The token ids of a sequence. Counts are updated on demand, by the tokens that changed."""

    __slots__ = ("_counts", "_num_counted", "follower", "prompt_length", "token_ids")

    def __init__(
        self, token_ids: Iterable[int], *, prompt_length: int, follower: Follower | None = None
    ) -> None:
        """`follower`: follows the output through the request's structure, if it has one."""
        self.follower = follower
        self.token_ids = list(token_ids)
        """Read only; the methods change it."""
        self.prompt_length = prompt_length
        self._counts = TokenCounts()
        self._num_counted = 0

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens."""
        self.token_ids.extend(token_ids)

    def truncate_to(self, length: int) -> None:
        """Keep the first `length` tokens."""
        self._cut(length)
        if length < self._num_counted:
            self.counts_of(length)
        del self.token_ids[length:]

    def put(self, position: int, token_id: int) -> None:
        """Change the token at a position."""
        self._cut(position)
        if position < self._num_counted:
            self.counts_of(position)
        self.token_ids[position] = token_id

    def _cut(self, length: int) -> None:
        if self.follower is not None:
            self.follower.cut(max(0, length - self.prompt_length))

    def allowed_V(self, length: int, path: Sequence[int]) -> NDArray[np.bool_] | None:
        """The tokens that the structure allows after `length` tokens and a path (Follower)."""
        if self.follower is None:
            raise InternalError("expected a text that follows its structure, got one without")
        start = self.prompt_length
        return self.follower.allowed_V(
            lambda first, end: self.token_ids[start + first : start + end], length - start, path
        )

    def prefix(self, length: int) -> Prefix:
        """The first `length` tokens. A view, valid until one of them changes."""
        return Prefix(self, length)

    def counts_of(self, length: int) -> TokenCounts:
        """The counts of the first `length` tokens, valid until those of another length are read."""
        if length > self._num_counted:
            change, first, end = self._counts.add, self._num_counted, length
        else:
            change, first, end = self._counts.remove, length, self._num_counted
        self._num_counted = length
        border = min(max(self.prompt_length, first), end)
        if first < border:
            change(self.token_ids[first:border], are_output=False)
        if border < end:
            change(self.token_ids[border:end], are_output=True)
        return self._counts


class Prefix(Sequence[int]):
    """All token ids before a row: the first `length` of a text, then a `path` of candidates."""

    __slots__ = ("length", "path", "text")

    def __init__(self, text: CountedText, length: int, path: tuple[int, ...] = ()) -> None:
        self.text = text
        self.length = length
        self.path = path

    @classmethod
    def of(cls, token_ids: Sequence[int], *, prompt_length: int) -> Prefix:
        """The tokens as a Prefix. They are counted again unless they are a Prefix already."""
        if isinstance(token_ids, Prefix):
            return token_ids
        return CountedText(token_ids, prompt_length=prompt_length).prefix(len(token_ids))

    def followed_by(self, path: Sequence[int]) -> Prefix:
        """The same tokens with further candidates."""
        return Prefix(self.text, self.length, (*self.path, *path)) if path else self

    @property
    def counts(self) -> TokenCounts:
        """The counts of the tokens before the path (CountedText.counts_of)."""
        return self.text.counts_of(self.length)

    def allowed_V(self) -> NDArray[np.bool_] | None:
        """The tokens that the structure allows next (CountedText.allowed_V)."""
        return self.text.allowed_V(self.length, self.path)

    @property
    def path_outputs(self) -> Counter[int]:
        """How often each id occurs in the part of the path that is output."""
        return Counter(self.path[max(0, self.text.prompt_length - self.length) :])

    def __len__(self) -> int:
        return self.length + len(self.path)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            first, end, step = index.indices(len(self))
            if step != 1:
                return [self[place] for place in range(first, end, step)]
            below = self.text.token_ids[first : min(end, self.length)]
            return [*below, *self.path[max(0, first - self.length) : max(0, end - self.length)]]
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"no token {index} of {len(self)}")
        return self.text.token_ids[place] if place < self.length else self.path[place - self.length]

"""Finds the requests of vLLM's batch again, by their tokens: its hook gets no request ids.

Rows move when requests end or are preempted. A request that comes back has the tokens that it had.
Requests with equal tokens are one text until they part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.int32]

COMPARED = 1024
"""Tokens that are compared to see whether a row goes on with the text that it had, counted from its
end, while each row has as many tokens as expected. Otherwise texts are compared as a whole."""

MOST_NEW = 4096
"""Most tokens that a row may have got since it was seen. With more it counts as another text."""

UNSEEN_CALLS = 8
"""Steps after which a text that no row shows is forgotten. A preempted request is found for so
long; later it begins anew."""

_KEY = 8


@dataclass(slots=True, eq=False)
class Text:
    """The tokens of one request, or of several equal ones.

    `length`: tokens that are known. `told`: those of them that the drafters' side was told.
    `sequence_id`: its id there; None: it is not open. `seen`: number of the call that saw it last.
    """

    tokens: Table
    length: int
    seen: int
    told: int = 0
    sequence_id: int | None = None

    @property
    def new_tokens(self) -> tuple[int, ...]:
        """The tokens that the drafters' side was not told."""
        return tuple(self.tokens[self.told : self.length].tolist())

    def _ends_like(self, row: Table, most: int) -> bool:
        """Whether the row has this text's last `most` tokens at their positions."""
        begin = max(0, self.length - most)
        own = self.tokens[begin : self.length].tobytes()
        return own == row[begin : self.length].tobytes()

    def continues_in(self, row: Table, length: int, call: int, *, most: int) -> bool:
        """Whether a row of `length` tokens goes on with this text.

        If another row of this call has it already, both rows must be equal: then they share it.
        """
        if self.seen == call:
            return self.length == length and self._ends_like(row, length)
        return self.length <= length <= self.length + MOST_NEW and self._ends_like(row, most)

    def advance(self, row: Table, length: int, call: int) -> None:
        if length > len(self.tokens):
            grown = np.empty(max(length, 2 * len(self.tokens)), dtype=np.int32)
            grown[: self.length] = self.tokens[: self.length]
            self.tokens = grown
        self.tokens[self.length : length] = row[self.length : length]
        self.length, self.seen = length, call


class Rows:
    """The texts of vLLM's rows. `most`: texts that are kept; beyond that, old ones are let go."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._at: list[Text | None] = []
        self._texts: dict[int, Text] = {}
        self._call = 0
        self._gone: list[Text] = []

    def __len__(self) -> int:
        return len(self._texts)

    def match(
        self, lengths: Sequence[int], table: Table, num_sampled: Sequence[int]
    ) -> list[Text | None]:
        """The text of each row. None: the row has no tokens.

        `lengths`: tokens of each row of `table` (rows, positions), those of the last step included.
        `num_sampled`: how many of these the last step committed; 0: it read the row's prompt.
        """
        self._call += 1
        call, before = self._call, self._at
        is_settled = len(before) == len(lengths) and all(
            text is not None and text.length + sampled == length
            for text, sampled, length in zip(before, num_sampled, lengths, strict=True)
        )
        found: list[Text | None] = [None] * len(lengths)
        missing: list[int] = []
        for row, length in enumerate(lengths):
            text = before[row] if row < len(before) else None
            most = COMPARED if is_settled else length
            if text is not None and text.continues_in(table[row], length, call, most=most):
                if text.length < length:
                    text.advance(table[row], length, call)
                text.seen = call
                found[row] = text
            elif length > 0:
                missing.append(row)
        if missing:
            self._look_up(missing, lengths, table, num_sampled, found)
        self._at = found
        if len(self._texts) > len(lengths):
            self._let_go()
        return found

    def has(self, text: Text) -> bool:
        return id(text) in self._texts

    def forget_all(self) -> None:
        """Let go of all texts: no row has any of them."""
        self._at = []
        self._gone += self._texts.values()
        self._texts.clear()

    def take_gone(self) -> list[Text]:
        """The texts that were let go since the last call."""
        gone, self._gone = self._gone, []
        return gone

    def _look_up(
        self,
        missing: Sequence[int],
        lengths: Sequence[int],
        table: Table,
        num_sampled: Sequence[int],
        found: list[Text | None],
    ) -> None:
        """Find the rows that show another text than before; begin texts for what is new."""
        known: dict[bytes, list[Text]] = {}
        for text in self._texts.values():
            known.setdefault(_key(text.tokens, text.length), []).append(text)
        for row in missing:
            tokens, length = table[row], lengths[row]
            begin = length - num_sampled[row]
            candidates = [*known.get(_key(tokens, begin), ()), *known.get(_key(tokens, length), ())]
            for text in candidates:
                if text.continues_in(tokens, length, self._call, most=length):
                    text.advance(tokens, length, self._call)
                    break
            else:
                text = Text(tokens[:length].astype(np.int32), length, self._call)
                self._texts[id(text)] = text
            # A further row of this call may be equal.
            known.setdefault(_key(tokens, length), []).append(text)
            found[row] = text

    def _let_go(self) -> None:
        """Let go of texts that were not seen for long, and of the oldest if there are too many."""
        unseen = [one for one in self._texts.values() if one.seen < self._call]
        unseen.sort(key=lambda one: one.seen)
        excess = len(self._texts) - self._most
        for number, text in enumerate(unseen):
            if number < excess or self._call - text.seen >= UNSEEN_CALLS:
                del self._texts[id(text)]
                self._gone.append(text)


def _key(tokens: Table, length: int) -> bytes:
    """What texts are looked up by: their length and last tokens."""
    return length.to_bytes(8, "little") + tokens[max(0, length - _KEY) : max(0, length)].tobytes()

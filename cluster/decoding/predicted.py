"""The text that a caller expects (predicted outputs): it drafts for its request until it fails.

The output is aligned with the prediction. Where it diverges, the place where they meet again is
found by the last tokens that both have. It never changes the text: the target verifies what is
foretold here. While a prediction helps, its sequence has no other drafter.
"""

from __future__ import annotations

from collections.abc import Sequence as TokenIds

NEAR = 64
"""Tokens before and after the expected place in which a meeting is looked for first."""
FAR_RUN = 8
"""Tokens that the output must share with the prediction for a meeting anywhere in it."""
MOST_COMMON = 16
"""Common tokens that are counted before a place."""
FIRST_TRUST, MEETING_TRUST, FULL_TRUST = 4, 4, 64
"""Most candidates that are offered first, and after a meeting. Each offer that is right doubles
them, up to the last number."""
MAX_MISSES = 5
"""A prediction is given up after this many wrong offers in a row, since each costs time."""
MAX_LOST = 256
"""A prediction is given up once the output has not met it for this many tokens."""


class PredictedText:
    """The tokens of a prediction, and where each run of FAR_RUN of them begins first."""

    def __init__(self, token_ids: TokenIds[int]) -> None:
        self.token_ids = token_ids
        self._ends: dict[tuple[int, ...], int] = {}
        for end in range(FAR_RUN, len(token_ids)):
            self._ends.setdefault(tuple(token_ids[end - FAR_RUN : end]), end)

    def meeting(self, output: TokenIds[int], expected: int, least: int) -> int | None:
        """The place that continues `output`, its last tokens; None: there is none.

        At least `least` tokens before it are the output's last ones. The place with the most of
        them, and of equal ones the nearest to `expected`, is taken.
        """
        ids, best, found = self.token_ids, (least - 1, 0), None
        last = output[-1]
        for place in range(max(1, expected - NEAR), min(len(ids) - 1, expected + NEAR) + 1):
            if ids[place - 1] != last:
                continue
            common, most = 1, min(len(output), place, MOST_COMMON)
            while common < most and ids[place - 1 - common] == output[-1 - common]:
                common += 1
            rank = (common, -abs(place - expected))
            if common >= least and (found is None or rank > best):
                best, found = rank, place
        if found is None and len(output) >= FAR_RUN:
            found = self._ends.get(tuple(output[-FAR_RUN:]))
        return found


class Prediction:
    """A prediction, and where the output of one sequence is in it."""

    def __init__(self, text: PredictedText, resumed: TokenIds[int] = ()) -> None:
        """`resumed`: output that was committed before."""
        self._text = text
        self._place: int | None = 0
        # Where the output left the prediction, counted on by what it has said since.
        self._expected = 0
        self._trust = FIRST_TRUST
        self._offered = 0
        self._misses = self._lost = 0
        self.num_accepted = 0
        """Output tokens that are the prediction's."""
        self.advance(resumed, len(resumed))
        self.num_accepted = 0

    def __len__(self) -> int:
        return len(self._text.token_ids)

    @property
    def is_given_up(self) -> bool:
        return self._misses >= MAX_MISSES or self._lost >= MAX_LOST

    def advance(self, committed: TokenIds[int], num_new: int) -> None:
        """Follow the last `num_new` of all committed tokens, those of the prompt included."""
        ids, offered, taken = self._text.token_ids, self._offered, 0
        self._offered = 0
        for place in range(len(committed) - num_new, len(committed)):
            token_id, diverges = committed[place], False
            if self._place is not None and self._place < len(ids):
                if ids[self._place] == token_id:
                    self._place += 1
                    self.num_accepted += 1
                    taken += 1
                    continue
                self._diverge(offered, taken)
                diverges = True
            self._expected += 1
            self._lost += 1
            self._place = self._text.meeting(
                committed[max(0, place + 1 - MOST_COMMON) : place + 1],
                self._expected,
                1 + self._misses,
            )
            if self._place is None and diverges and not self._misses:
                self._place = self._expected  # As if one token replaced another.
            if self._place is not None:
                self._lost, offered, taken = 0, 0, 0
                self._trust = MEETING_TRUST
        if offered and taken >= offered:
            self._misses = 0
            self._trust = min(2 * self._trust, FULL_TRUST)

    def foretold(self, most: int) -> TokenIds[int]:
        """At most `most` tokens that are expected next, to be verified as candidates."""
        if self._place is None or self.is_given_up:
            return ()
        foretold = self._text.token_ids[self._place : self._place + min(most, self._trust)]
        self._offered = len(foretold)
        return foretold

    def _diverge(self, offered: int, taken: int) -> None:
        assert self._place is not None
        self._expected, self._place = self._place, None
        if offered and not taken:
            self._misses += 1

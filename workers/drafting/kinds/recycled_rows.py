"""The rows of Token Recycling: the target's likeliest next tokens when a token was last fed."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeVar

from workers.drafting.chances import RankChances
from workers.drafting.protocols import TopTokens

KeyT = TypeVar("KeyT")

ROW_LENGTH = 8
MAX_ROWS = 32_768
"""Maximum number of rows by two tokens, and also of rows by one token, per tenant. Beyond that, the
rows learned longest ago are forgotten. Together they take some 15 MB of memory.
"""


class RowKey(enum.Enum):
    """The tokens that a row belongs to: the last two, or the last one."""

    PAIR = "pair"
    TOKEN = "token"


Row = tuple[RowKey, tuple[int, ...]]
"""The key kind of a row, which decides how often it is right; its candidates, likeliest first."""

_SHARES = {
    RowKey.PAIR: (0.54, 0.09, 0.04, 0.035, 0.02, 0.017, 0.007, 0.007),
    RowKey.TOKEN: (0.21, 0.06, 0.05, 0.045, 0.035, 0.025, 0.01, 0.01),
}
"""The assumed shares of next tokens that were the first, second, ... of a row, until observations
replace them. Measured on the demo model's greedy answers to two prompts of each Spec-Bench
category.
"""


class RowTable:
    """The rows that a tenant's requests have produced.

    Luo et al. 2024 have one row per token. Here a row by the last two tokens takes precedence if it
    exists: it is right more than twice as often.
    """

    def __init__(self) -> None:
        self._of_token: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._of_pair: OrderedDict[tuple[int, int], tuple[int, ...]] = OrderedDict()

    def learn(self, top: TopTokens) -> None:
        """Replace the rows of a token that the target was fed."""
        row = tuple(dict.fromkeys(top.top_ids))[:ROW_LENGTH]
        _put_last(self._of_token, top.token_id, row)
        if top.previous_id is not None:
            _put_last(self._of_pair, (top.previous_id, top.token_id), row)

    def row(self, previous_id: int | None, token_id: int) -> Row:
        """The row after a token; empty after a token that was never seen."""
        if previous_id is not None and (row := self._of_pair.get((previous_id, token_id))):
            return RowKey.PAIR, row
        return RowKey.TOKEN, self._of_token.get(token_id, ())


def _put_last(rows: OrderedDict[KeyT, tuple[int, ...]], key: KeyT, row: tuple[int, ...]) -> None:
    rows[key] = row
    rows.move_to_end(key)
    if len(rows) > MAX_ROWS:
        rows.popitem(last=False)


class RowChances:
    """How often each rank of a row was right, over all tenants."""

    def __init__(self) -> None:
        self._of_key = {key: _chances_of(shares) for key, shares in _SHARES.items()}
        self._of_all = _chances_of(_SHARES[RowKey.TOKEN])

    def chance(self, row: Row, rank: int) -> float:
        """The probability that the candidate of this rank is right."""
        return self._of_key[row[0]].mean(rank)

    @property
    def first(self) -> float:
        """The probability that the first of a row is right, for rows of either kind."""
        return self._of_all.mean(0)

    def observe(self, row: Row, follower: int) -> None:
        """Note which token really followed a row."""
        key, token_ids = row
        for rank, token_id in enumerate(token_ids):
            self._of_key[key].observe(rank, 0.0, accepted=token_id == follower)
            self._of_all.observe(rank, 0.0, accepted=token_id == follower)


def _chances_of(shares: Sequence[float]) -> RankChances:
    return RankChances(lambda rank, gap: shares[rank])

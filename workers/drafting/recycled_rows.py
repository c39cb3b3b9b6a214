"""The rows of Token Recycling: what the target last thought likeliest after its own tokens."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeVar

from workers.drafting.chances import RankChances
from workers.drafting.proposer import TopTokens

KeyT = TypeVar("KeyT")

ROW_LENGTH = 8
MAX_ROWS = 32_768
"""Rows by two tokens that a tenant has, and as many by one; of more, those learned longest ago are
forgotten. Both together take some 15 MB of memory."""


class RowKey(enum.Enum):
    """What a row is of."""

    PAIR = "pair"
    TOKEN = "token"


Row = tuple[RowKey, tuple[int, ...]]
"""Candidates, the likeliest first, and what they are of: it says how often they are right."""

_SHARES = {
    RowKey.PAIR: (0.54, 0.09, 0.04, 0.035, 0.02, 0.017, 0.007, 0.007),
    RowKey.TOKEN: (0.21, 0.06, 0.05, 0.045, 0.035, 0.025, 0.01, 0.01),
}
"""How often the target's next token is taken to be the first, second, ... of a row until that was
seen: the shares in the demo model's greedy answers to two prompts of each Spec-Bench category."""


class RowTable:
    """What a tenant's requests have shown.

    Luo et al. 2024 have a row a token. Here one by the last two tokens comes before it, where there
    is one: it is right more than twice as often.
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
        """What may follow a token; nothing after one that was never seen."""
        if previous_id is not None and (row := self._of_pair.get((previous_id, token_id))):
            return RowKey.PAIR, row
        return RowKey.TOKEN, self._of_token.get(token_id, ())


def _put_last(rows: OrderedDict[KeyT, tuple[int, ...]], key: KeyT, row: tuple[int, ...]) -> None:
    rows[key] = row
    rows.move_to_end(key)
    if len(rows) > MAX_ROWS:
        rows.popitem(last=False)


class RowChances:
    """How often each rank of a row was right, of all tenants together."""

    def __init__(self) -> None:
        self._of_key = {key: _chances_of(shares) for key, shares in _SHARES.items()}
        self._of_all = _chances_of(_SHARES[RowKey.TOKEN])

    def chance(self, row: Row, rank: int) -> float:
        """That the candidate of that rank is right."""
        return self._of_key[row[0]].mean(rank)

    @property
    def first(self) -> float:
        """That the first of a row is right, whatever the row is of."""
        return self._of_all.mean(0)

    def observe(self, row: Row, follower: int) -> None:
        """What followed in truth."""
        key, token_ids = row
        for rank, token_id in enumerate(token_ids):
            self._of_key[key].observe(rank, 0.0, accepted=token_id == follower)
            self._of_all.observe(rank, 0.0, accepted=token_id == follower)


def _chances_of(shares: Sequence[float]) -> RankChances:
    return RankChances(lambda rank, gap: shares[rank])

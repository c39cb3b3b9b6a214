"""Token Recycling (Luo et al. 2024): the target's own discarded candidates become drafts.

Every token that the target was fed, prompt tokens included, has a row: the target's likeliest next
tokens at that time. A draft follows the rows from the last committed token on.

The paper spends 80 nodes on one tree of fixed shape, since wide steps are nearly free on its
devices. Here the grant's nodes go to the likeliest candidates, judged by how often each rank of a
row was right. There is no model, and positions play no role. The rows of a tenant outlive its
requests.
"""

from __future__ import annotations

import enum
import heapq
from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeVar

from paceline.options import Stopping
from workers.drafting.chances import RankChances
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

KeyT = TypeVar("KeyT")

ROW_LENGTH = 8
MAX_ROWS = 32_768
"""Maximum number of rows with the key PAIR in a table, and also of rows with the key TOKEN. Beyond
that, the rows learned longest ago are forgotten. A full table takes some 15 MB of memory.
"""


class RowKey(enum.Enum):
    """The tokens that a row belongs to: the last two, or the last one."""

    PAIR = "pair"
    TOKEN = "token"


Row = tuple[RowKey, tuple[int, ...]]
"""The key that gave the row, since rows by PAIR are right more often; the candidates, the likeliest
first.
"""

_SHARES = {
    RowKey.PAIR: (0.54, 0.09, 0.04, 0.035, 0.02, 0.017, 0.007, 0.007),
    RowKey.TOKEN: (0.21, 0.06, 0.05, 0.045, 0.035, 0.025, 0.01, 0.01),
}
"""Priors: the share of next tokens that were the first, second, ... candidate of a row. Measured on
the demo model's greedy answers to two prompts of each Spec-Bench category. Observations replace
them over time.
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
        """Replace the rows of one token that the target was fed."""
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
        return self._of_key[row[0]].mean(rank)

    @property
    def first(self) -> float:
        """The probability that the first candidate of a row is right, over both keys."""
        return self._of_all.mean(0)

    def observe(self, row: Row, follower: int) -> None:
        """Note that `follower` is the token that was committed where `row` applied."""
        key, token_ids = row
        for rank, token_id in enumerate(token_ids):
            self._of_key[key].observe(rank, 0.0, accepted=token_id == follower)
            self._of_all.observe(rank, 0.0, accepted=token_id == follower)


def _chances_of(shares: Sequence[float]) -> RankChances:
    return RankChances(lambda rank, gap: shares[rank])


_Learner = tuple[str, int | None]
"""A tenant, and the target's vocabulary size: targets of different sizes share no rows."""

MAX_TREE_NODES = 80
MAX_TABLES = 64
"""Maximum number of tables. Beyond that, the table for which a sequence was opened longest ago is
dropped.
"""

_Candidate = tuple[tuple[float, int, int], int, int]
"""Its sort key (minus its chance, its parent, its rank in the row), its token, and the number of
tokens that may follow it.
"""


class RecyclingProposer(TakesNoTime):
    """Follows the rows of a tenant's table. After a draft, the next one needs an outcome."""

    def __init__(self) -> None:
        self._tables: OrderedDict[_Learner, RowTable] = OrderedDict()
        self._table_of: dict[DraftTree, RowTable] = {}
        self._chances = RowChances()

    @property
    def info(self) -> DrafterInfo:
        return DrafterInfo(RECYCLING.name, RECYCLING.rules, wants_top_tokens=True)

    def open(self, tree: DraftTree) -> None:
        learner = (tree.tenant, tree.vocab_size)
        table = self._tables.setdefault(learner, RowTable())
        self._tables.move_to_end(learner)
        if len(self._tables) > MAX_TABLES:
            self._tables.popitem(last=False)
        self._table_of[tree] = table

    def close(self, tree: DraftTree) -> None:
        del self._table_of[tree]

    def committed(self, tree: DraftTree, kept: Kept, top_tokens: Sequence[TopTokens]) -> None:
        table, committed = self._table_of[tree], tree.committed
        for position in range(len(committed) - len(kept.token_ids), len(committed)):
            previous_id = committed[position - 2] if position > 1 else None
            row = table.row(previous_id, committed[position - 1])
            self._chances.observe(row, committed[position])
        for one in top_tokens:
            table.learn(one)

    def draft(self, tree: DraftTree) -> Draft:
        forked = tree.grant.branches > 1 or not tree.is_chain
        follow = _follow_best if forked else _follow_first
        new, gain = follow(tree, self._table_of[tree], self._chances, tree.price)
        state = {}
        if tree.stopping is Stopping.COST:
            state = {"gain": gain, "price": tree.price, "acceptance_rate": self._chances.first}
        return Draft(tree, new, last=True, stopping_state=state)

    def check_integrity(self, trees: Sequence[DraftTree]) -> None:
        assert set(self._table_of) == set(trees), "a sequence was leaked or lost"
        assert len(self._tables) <= MAX_TABLES, "tables of too many tenants are kept"


def _last_two(tree: DraftTree, node: int) -> tuple[int | None, int]:
    """The token before a node, or None, and the node's own token."""
    if node != ROOT:
        return tree.tokens[tree.parents[node]], tree.tokens[node]
    return (tree.committed[-2] if tree.num_committed > 1 else None), tree.tokens[ROOT]


def _follow_best(
    tree: DraftTree, table: RowTable, chances: RowChances, price: float
) -> tuple[NewNodes, float]:
    """The likeliest nodes by the rows, the likeliest first, and the chance of the last one.

    A node's chance is the product of the chances of the ranks on its path. Nodes with a chance
    below `price` are left out, except one: without candidates, their cost could not be measured.
    """
    branches = min(tree.grant.branches, ROW_LENGTH)
    budget = min(MAX_TREE_NODES, tree.nodes_left + tree.num_nodes)
    token_ids: list[int] = []
    parents: list[int] = []
    edge: list[_Candidate] = []
    last = 0.0

    def push_row(parent: int, row: Row, reached: float, room: int) -> None:
        for rank, child in enumerate(row[1][:branches]):
            order = (-reached * chances.chance(row, rank), parent, rank)
            heapq.heappush(edge, (order, child, room - 1))

    if tree.room(ROOT) > 0:
        push_row(ROOT, table.row(*_last_two(tree, ROOT)), 1.0, tree.room(ROOT))
    while edge and len(token_ids) < budget:
        (negative, parent, _), child, room = heapq.heappop(edge)
        if -negative < price and token_ids:
            break
        last = -negative
        token_ids.append(child)
        parents.append(parent)
        if room > 0 and child not in tree.spec.end_token_ids:
            above = token_ids[parent - 1] if parent else tree.tokens[ROOT]
            push_row(len(token_ids), table.row(above, child), last, room)
    return tree.unknown_part(token_ids, parents), last


def _follow_first(
    tree: DraftTree, table: RowTable, chances: RowChances, price: float
) -> tuple[NewNodes, float]:
    """The chain of each row's first candidate, and the chance of its last token."""
    token_ids: list[int] = []
    previous_id, token_id = _last_two(tree, tree.end)
    reached = chances.first**tree.num_nodes
    while len(token_ids) < tree.chain_room:
        row = table.row(previous_id, token_id)
        chance = reached * chances.chance(row, 0)
        if not row[1] or (chance < price and (token_ids or tree.num_nodes)):
            break
        reached = chance
        previous_id, token_id = token_id, row[1][0]
        token_ids.append(token_id)
        if token_id in tree.spec.end_token_ids:
            break
    return NewNodes(token_ids), reached


async def _load(options: DrafterOptions) -> RecyclingProposer:
    return RecyclingProposer()


RECYCLING = DRAFTERS.add(
    DrafterKind(
        name="recycling",
        help="token recycling: follows the target's likeliest tokens of earlier steps",
        paper="Luo et al. 2024, Turning Trash into Treasure, arXiv:2408.08696",
        load=_load,
        candidates=CandidateKind.DETERMINISTIC,
    )
)

"""Token Recycling (Luo et al. 2024): the target's own second thoughts are drafts for later.

Every token has a row: the target's likeliest next tokens when it was last fed. A draft is a tree
of fixed shape that follows the rows from the last committed token on. No model, no memory of
positions; the rows of a tenant outlive its requests.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import lru_cache

from paceline.rules import Rule
from workers.drafting.ngram import ANY_POSITION, MAX_PROPOSED
from workers.drafting.proposer import Draft, DrafterInfo, Pass, TopTokens
from workers.drafting.tree import ROOT, DraftTree, Kept, NewNodes

ROW_LENGTH = 8
MAX_TREE_NODES = 80
MAX_TABLES = 64
"""Tenants whose rows are kept; of more, those that opened a sequence longest ago are forgotten."""
RANK_WORTH = (0.50, 0.14, 0.07, 0.05, 0.03, 0.025, 0.02, 0.015)
"""How often the target's next token is taken to be the first, second, ... of its row."""

_Table = dict[int, tuple[int, ...]]


class RecyclingProposer:
    """Follows the rows of a tenant's table. A draft is complete: the next one needs an outcome."""

    def __init__(self) -> None:
        self._tables: OrderedDict[str, _Table] = OrderedDict()
        self._table_of: dict[DraftTree, _Table] = {}

    @property
    def info(self) -> DrafterInfo:
        rules = frozenset({Rule.COUPLED, Rule.ONE_HOT})
        return DrafterInfo("recycling", "", 0, b"", ANY_POSITION, rules, wants_top_tokens=True)

    def open(self, tree: DraftTree) -> None:
        table = self._tables.setdefault(tree.tenant, {})
        self._tables.move_to_end(tree.tenant)
        if len(self._tables) > MAX_TABLES:
            self._tables.popitem(last=False)
        self._table_of[tree] = table

    def close(self, tree: DraftTree) -> None:
        del self._table_of[tree]

    def committed(self, tree: DraftTree, kept: Kept, top_tokens: Sequence[TopTokens]) -> None:
        table = self._table_of[tree]
        for one in top_tokens:
            table[one.token_id] = tuple(dict.fromkeys(one.top_ids))[:ROW_LENGTH]

    def run_pass(self, trees: Sequence[DraftTree], *, pass_ms: float) -> Pass:
        result = Pass(took_part=list(trees))
        for tree in trees:
            forked = tree.grant.branches > 1 or not tree.is_chain
            follow = _follow_template if forked else _follow_first
            result.drafts.append(Draft(tree, follow(tree, self._table_of[tree]), last=True))
        return result

    def check_integrity(self, trees: Sequence[DraftTree]) -> None:
        assert set(self._table_of) == set(trees), "a sequence was leaked or lost"
        assert len(self._tables) <= MAX_TABLES, "tables of too many tenants are kept"


@lru_cache(maxsize=64)
def template(branches: int, depth: int) -> tuple[tuple[int, int], ...]:
    """The shape of a draft: of each node, its parent (as on the wire) and its rank in the row.

    The nodes worth most, in that order: a node is worth the product of the ranks' worth on its
    path. At most `branches` children a node, and `depth` nodes on a path.
    """
    nodes: list[tuple[int, int]] = []
    # Nodes whose parents are in: (minus the worth, parent, rank, depth).
    edge = [(-RANK_WORTH[0], ROOT, 0, 1)] if depth > 0 else []
    while edge and len(nodes) < MAX_TREE_NODES:
        worth, parent, rank, level = heapq.heappop(edge)
        nodes.append((parent, rank))
        if rank + 1 < min(branches, ROW_LENGTH):
            sibling = worth / RANK_WORTH[rank] * RANK_WORTH[rank + 1]
            heapq.heappush(edge, (sibling, parent, rank + 1, level))
        if level < depth:
            heapq.heappush(edge, (worth * RANK_WORTH[0], len(nodes), 0, level + 1))
    return tuple(nodes)


def _follow_template(tree: DraftTree, table: Mapping[int, Sequence[int]]) -> NewNodes:
    shape = template(tree.grant.branches, tree.room(ROOT))
    token_ids: list[int] = []
    parents: list[int] = []
    # By the template's numbers: a node's number and its token, for those that a row has.
    found = {ROOT: (ROOT, tree.tokens[ROOT])}
    for place, (parent, rank) in enumerate(shape, start=1):
        if parent not in found:
            continue
        number, token_id = found[parent]
        row = table.get(token_id, ())
        if rank < len(row):
            token_ids.append(row[rank])
            parents.append(number)
            found[place] = (len(token_ids), row[rank])
    return tree.unknown_part(token_ids, parents)


def _follow_first(tree: DraftTree, table: Mapping[int, Sequence[int]]) -> NewNodes:
    """The best chain: always the first of the row."""
    token_ids: list[int] = []
    token_id = tree.tokens[tree.end]
    while len(token_ids) < min(tree.chain_room, MAX_PROPOSED):
        row = table.get(token_id)
        if not row:
            break
        token_id = row[0]
        token_ids.append(token_id)
        if token_id in tree.spec.end_token_ids:
            break
    return NewNodes(token_ids)

"""Token Recycling (Luo et al. 2024): the target's own discarded candidates become drafts.

Every token that the target was fed has a row: its likeliest next tokens at that time
(recycled_rows.py). This includes the prompt's tokens. A draft follows the rows from the last
committed token on.

The paper spends 80 nodes on one tree of fixed shape, since wide steps are nearly free on its
devices. Here nodes are spent where acceptance is likeliest, by how often each rank of a row was
right, and within the window. There is no model and no memory of positions. The rows of a tenant
outlive its requests.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence

from paceline.rules import MAX_PROPOSED, Stopping
from workers.drafting.branches import unknown_part
from workers.drafting.kinds.recycled_rows import ROW_LENGTH, Row, RowChances, RowTable
from workers.drafting.nodes import ROOT, Kept, NewNodes
from workers.drafting.proposer import ANY_POSITION, Draft, DrafterInfo, Pass, TakesNoTime, TopTokens
from workers.drafting.tree import DraftTree
from workers.verification.rule import CandidateKind, rules_exact_for

_Learner = tuple[str, int | None]
"""A tenant, and the target's vocabulary size: targets of different sizes share no rows."""

MAX_TREE_NODES = 80
MAX_TABLES = 64
"""Maximum number of tables kept. Beyond that, those in which a sequence was opened longest ago are
forgotten.
"""

_Candidate = tuple[tuple[float, int, int], int, int]
"""Its sort key (minus its chance, its parent, its rank in the row), its token, and the number of
tokens that may follow it.
"""


class RecyclingProposer(TakesNoTime):
    """Follows the rows of a tenant's table. A draft is complete: the next one needs an outcome."""

    def __init__(self) -> None:
        self._tables: OrderedDict[_Learner, RowTable] = OrderedDict()
        self._table_of: dict[DraftTree, RowTable] = {}
        self._chances = RowChances()

    @property
    def info(self) -> DrafterInfo:
        rules = rules_exact_for(CandidateKind.DETERMINISTIC)
        return DrafterInfo("recycling", "", 0, b"", ANY_POSITION, rules, wants_top_tokens=True)

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

    def run_pass(self, trees: Sequence[DraftTree], *, pass_ms: float) -> Pass:
        result = Pass(took_part=list(trees))
        for tree in trees:
            try:
                result.drafts.append(self._draft(tree))
            except Exception as error:
                result.fail(tree, error)
        return result

    def _draft(self, tree: DraftTree) -> Draft:
        forked = tree.grant.branches > 1 or not tree.is_chain
        follow = _follow_best if forked else _follow_first
        price = _price(tree)
        new, gain = follow(tree, self._table_of[tree], self._chances, price)
        state = {}
        if tree.stopping is Stopping.COST:
            state = {"gain": gain, "price": price, "acceptance_rate": self._chances.first}
        return Draft(tree, new, last=True, stopping_state=state)

    def check_integrity(self, trees: Sequence[DraftTree]) -> None:
        assert set(self._table_of) == set(trees), "a sequence was leaked or lost"
        assert len(self._tables) <= MAX_TABLES, "tables of too many tenants are kept"


def _price(tree: DraftTree) -> float:
    """The least chance of acceptance at which a candidate is worth its place in a step."""
    if tree.stopping is not Stopping.COST:
        return 0.0
    return tree.grant.tokens_per_ms * tree.grant.step_ms_per_candidate


def _last_two(tree: DraftTree, node: int) -> tuple[int | None, int]:
    """The token before a node, or None, and the node's own token."""
    if node != ROOT:
        return tree.tokens[tree.parents[node]], tree.tokens[node]
    return (tree.committed[-2] if tree.num_committed > 1 else None), tree.tokens[ROOT]


def _follow_best(
    tree: DraftTree, table: RowTable, chances: RowChances, price: float
) -> tuple[NewNodes, float]:
    """The likeliest nodes that the rows give, best first, and the chance of the last one.

    A node's chance is the product of the chances of the ranks on its path. Nodes below `price` are
    left out, except for one, so that the cost of candidates stays known.
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
    return unknown_part(tree, token_ids, parents), last


def _follow_first(
    tree: DraftTree, table: RowTable, chances: RowChances, price: float
) -> tuple[NewNodes, float]:
    """The chain that always takes the first of a row, and the chance of its end."""
    token_ids: list[int] = []
    previous_id, token_id = _last_two(tree, tree.end)
    reached = chances.first**tree.num_nodes
    while len(token_ids) < min(tree.chain_room, MAX_PROPOSED):
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

"""Drafts several tokens after each outcome in one forward pass (PARD, An et al. 2025).

A pass feeds the drafted nodes and, after each node to be continued, a chain of mask tokens. The
node's row of logits is that of the next token; the row of the i-th mask token is that of the i-th
token after it, whatever the tokens between them are. So one pass continues every branch by several
tokens: the tree grows by the rows at hand until all its likely nodes lack one. Only KV of committed
tokens is kept: drafted nodes are fed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from paceline.errors import OverloadedError
from workers.drafting.draw import draw_one
from workers.drafting.growth import Growth
from workers.drafting.kind import DrafterInfo, Pass, TopTokens
from workers.drafting.kinds.model import SHORT
from workers.drafting.kinds.model.proposer import OnEngine
from workers.drafting.kinds.parallel import PARALLEL, rows_each
from workers.drafting.rows_ahead import RowsAhead
from workers.drafting.tree import ROOT, DraftTree, Kept, NewNodes
from workers.engine.engine import Engine
from workers.engine.local_cache import LocalSequence
from workers.engine.slices import Slice
from workers.verification.grammars import Grammars

PREFILL = 128
"""Maximum number of prompt tokens in a pass. A pass has the prompt of one sequence at most."""


@dataclass(slots=True)
class _Held:
    sequence: LocalSequence
    growth: Growth
    ahead: RowsAhead[Tensor] = field(default_factory=RowsAhead)


@dataclass(slots=True)
class _Turn:
    """A tree's part in a pass. `nodes`: to be continued; `fed`: those fed, and their rows each."""

    tree: DraftTree
    nodes: list[int]
    piece: Slice | None = None
    fed: list[tuple[int, int]] = field(default_factory=list)


class ParallelProposer:
    """Draws candidates from a parallel model's distributions, as each sequence's rule asks."""

    def __init__(
        self,
        engine: Engine,
        mask_token_id: int,
        *,
        parallel_tokens: int = 8,
        prefix_cache: bool = True,
        grammars: Grammars | None = None,
    ) -> None:
        """`parallel_tokens`: the most tokens that a pass drafts after one node."""
        self._engine = engine
        self._mask = mask_token_id
        self._most = parallel_tokens
        self._own = OnEngine(engine, PARALLEL, prefix_cache=prefix_cache, grammars=grammars)
        self._held: dict[DraftTree, _Held] = {}
        self._pass_ms = 0.0

    @property
    def info(self) -> DrafterInfo:
        return self._own.info

    def open(self, tree: DraftTree) -> None:
        self._held[tree] = _Held(*self._own.open(tree))

    def settle(self, tree: DraftTree, count: int) -> None:
        """Do nothing: each pass chooses the tokens that it feeds."""

    def close(self, tree: DraftTree) -> None:
        del self._held[tree]
        self._own.cache.close(tree)

    def committed(self, tree: DraftTree, kept: Kept, top_tokens: Sequence[TopTokens]) -> None:
        held = self._held[tree]
        held.growth.committed(kept)
        held.ahead.clear()

    def at_hand(self, tree: DraftTree) -> NewNodes:
        held = self._held[tree]
        new = held.growth.at_hand()
        if new.token_ids or held.ahead.is_empty:
            return new
        nodes = held.ahead.known(tree, held.growth.to_feed(pass_ms=self._pass_ms))
        return self._draw(tree, held, nodes) if nodes else new

    def promise(self, tree: DraftTree) -> float:
        return self._held[tree].growth.promise()

    def run_pass(self, trees: Sequence[DraftTree], *, pass_ms: float) -> Pass:
        result = Pass()
        self._pass_ms = pass_ms
        turns = self._choose(trees, result)
        fed = [turn for turn in turns if turn.piece is not None]
        if fed:
            self._feed(fed, result)
        for turn in turns:
            result.took_part.append(turn.tree)
            if turn.nodes or turn.piece is None:
                held = self._held[turn.tree]
                try:
                    new = self._draw(turn.tree, held, turn.nodes)
                    if (draft := held.growth.draft_of(turn.nodes, new)) is not None:
                        result.drafts.append(draft)
                except Exception as error:  # Of one sequence: others go on.
                    result.fail(turn.tree, error)
        return result

    def check_integrity(self, trees: Sequence[DraftTree]) -> None:
        self._own.cache.check_integrity()
        assert set(self._held) == set(trees), "a sequence was leaked or lost"
        for tree, held in self._held.items():
            ids = held.sequence.token_ids
            assert ids == list(tree.committed[: len(ids)]), "KV is kept of other tokens"
            assert held.sequence.num_stored == len(ids)
            held.ahead.check_integrity(tree)
            held.growth.check_integrity()

    def _choose(self, trees: Sequence[DraftTree], result: Pass) -> list[_Turn]:
        """Each tree's part in this pass. The oldest prompt that is not read gets a piece of it."""
        turns: list[_Turn] = []
        for tree in trees:
            held = self._held[tree]
            try:
                turn = _Turn(tree, held.growth.to_feed(pass_ms=self._pass_ms))
                if turn.nodes and self._own.shares_prefixes:
                    held.sequence.adopt(tree.committed)
                left = tree.num_committed - held.sequence.num_stored
                if turn.nodes and left > SHORT:
                    if result.prefilled:
                        continue
                    result.prefilled = True
                    if left > PREFILL:
                        turn.nodes = []
                        self._plan_prefill(turn, held)
                if turn.nodes:
                    self._plan(turn, held)
            except OverloadedError as error:
                result.short.append((tree, f"the drafter's KV memory is full: {error}"))
                continue
            except Exception as error:  # Of one sequence: others go on.
                result.fail(tree, error)
                continue
            turns.append(turn)
        return turns

    def _plan_prefill(self, turn: _Turn, held: _Held) -> None:
        sequence, committed = held.sequence, turn.tree.committed
        first = len(sequence)
        sequence.extend(committed[first : first + PREFILL])
        turn.piece = sequence.pending_slice(num_logits=0)

    def _plan(self, turn: _Turn, held: _Held) -> None:
        """The slice that feeds what the nodes need: the text, the nodes above, mask tokens.

        Raises OverloadedError, and takes no memory, if there is too little.
        """
        tree, sequence, leaves = turn.tree, held.sequence, turn.nodes
        if leaves == [ROOT] and sequence.num_stored == tree.num_committed:
            sequence.truncate_to(tree.num_committed - 1)  # Its logits are needed once more.
        above = {node for leaf in leaves for node in tree.path_to(leaf)} - set(leaves)
        # By slot after the committed tokens: token and parent, as in Slice.
        token_ids: list[int] = []
        parents: list[int] = []
        slot_of = {ROOT: 0}

        def put(token_id: int, parent: int) -> int:
            token_ids.append(token_id)
            parents.append(parent)
            return len(token_ids)

        for node in sorted(above):
            slot_of[node] = put(tree.tokens[node], slot_of[tree.parents[node]])
        each = rows_each(self._most, len(leaves), tree.grant)
        for leaf in leaves:
            slot = 0
            if leaf != ROOT:
                slot = put(tree.tokens[leaf], slot_of[tree.parents[leaf]])
            num_rows = min(each, tree.room(leaf))
            for _ in range(num_rows - 1):
                slot = put(self._mask, slot)
            turn.fed.append((leaf, num_rows))
        first = len(sequence)
        sequence.extend([*tree.committed[first:], *token_ids])
        plain = sequence.pending_slice(num_logits=sum(count for _, count in turn.fed))
        turn.piece = plain
        if parents != list(range(len(parents))):
            turn.piece = Slice(
                list(plain.block_table),
                plain.start,
                plain.token_ids,
                plain.num_logits,
                tree_start=tree.num_committed,
                parents=tuple(parents),
            )
        else:
            plain.block_table = list(plain.block_table)

    def _feed(self, turns: Sequence[_Turn], result: Pass) -> None:
        """Run the model. Keep the rows of each node, and KV of committed tokens alone."""
        pieces = [turn.piece for turn in turns if turn.piece is not None]
        try:
            logits_TV = self._engine.step(pieces).cpu()
        except BaseException:
            for turn in turns:
                sequence = self._held[turn.tree].sequence
                sequence.truncate_to(sequence.num_stored)
            raise
        first = 0
        for turn, piece in zip(turns, pieces, strict=True):
            held, count = self._held[turn.tree], len(piece.token_ids)
            sequence = held.sequence
            sequence.mark_stored(count)
            sequence.truncate_to(min(len(sequence), turn.tree.num_committed))
            if self._own.shares_prefixes:
                sequence.offer(len(sequence) - 1)
            result.tokens_fed += count
            result.fed[turn.tree] = count
            for node, num_rows in turn.fed:
                held.ahead.give(node, logits_TV[first : first + num_rows])
                first += num_rows

    def _draw(self, tree: DraftTree, held: _Held, nodes: list[int]) -> NewNodes:
        """Draw under nodes that have a row. Returns the candidates to add."""
        growth = held.growth
        for node in nodes:
            row = held.ahead.take(node)
            if growth.needs_token_alone:
                text = tree.prefix(node)
                children = draw_one(row[: tree.vocab_size], tree.spec, text, prefix_hash=0)
                return growth.lengthen(node, children.token_ids[0])
            growth.expand(node, row)
        return growth.harvest(nodes, pass_ms=self._pass_ms)

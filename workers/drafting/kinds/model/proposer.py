"""Drafts with a small model: all open sequences together in each forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from paceline.errors import OverloadedError
from workers.drafting.chances import RankChances, coupled_prior, drawn_prior
from workers.drafting.draft_stopping import DrafterStopping, Stopper
from workers.drafting.growth import Growth
from workers.drafting.kind import DrafterInfo, DrafterKind, Pass, TopTokens
from workers.drafting.kinds.model import MODEL, SHORT
from workers.drafting.kinds.model.translation import TranslatedText, Translation
from workers.drafting.kinds.model.tree_kv import SameText, TreeKv, final_tokens
from workers.drafting.online import OnlineLearning
from workers.drafting.tree import ROOT, DraftTree, Kept, NewNodes
from workers.engine.engine import Engine
from workers.engine.local_cache import LocalCache, LocalSequence
from workers.engine.slices import KvMoves, Slice
from workers.verification.device_choice import Row, best_tokens, choose_tokens
from workers.verification.distribution import check_likeliest
from workers.verification.grammars import Grammars
from workers.verification.rule import rule_named
from workers.verification.staging import to_device, to_host

PREFILL_ALONE = 128
"""Maximum number of prompt tokens in a pass while no sequence is drafting."""
PREFILL_BESIDE = 32
"""The same while other sequences draft: their next token waits for the prefill."""


@dataclass(slots=True)
class _Held:
    kv: TreeKv
    growth: Growth


@dataclass(slots=True)
class _Turn:
    """A tree's part in a pass: `piece` is fed, or nothing; its logits belong to `nodes`."""

    tree: DraftTree
    piece: Slice | None
    nodes: list[int]


class OnEngine:
    """What proposers with a model share: sequences in an engine's KV, and what outcomes taught."""

    def __init__(
        self,
        engine: Engine,
        kind: DrafterKind,
        *,
        prefix_cache: bool,
        grammars: Grammars | None,
        vocabulary: tuple[int, bytes] | None = None,
    ) -> None:
        """`prefix_cache`: whether sequences of one tenant share the KV of equal prefixes.

        `grammars`: compiles structures; None: sequences with a structure are declined.
        `vocabulary`: the size and digest of that in which it drafts; None: the model's.
        """
        own = engine.info.vocab_size, engine.info.vocabulary_digest
        vocab_size, vocabulary_digest = own if vocabulary is None else vocabulary
        self.cache = LocalCache(engine.num_blocks, engine.block_size)
        self.info = DrafterInfo(
            kind=kind.name,
            rules=kind.rules,
            model=engine.info.name,
            vocab_size=vocab_size,
            vocabulary_digest=vocabulary_digest,
            max_position=engine.max_model_len,
        )
        self.shares_prefixes = prefix_cache
        self._grammars = grammars
        self._chances = {
            rule: RankChances(coupled_prior if rule_named(rule).shares_noise else drawn_prior)
            for rule in kind.rules
        }
        self._stopping = DrafterStopping()

    def open(
        self, tree: DraftTree, token_ids: Sequence[int] | None = None
    ) -> tuple[LocalSequence, Growth]:
        """Open a tree's sequence. Raises OverloadedError, and keeps nothing, if memory is full.

        `token_ids`: those of its text that are final; None: the committed ones.
        """
        token_ids = tree.committed if token_ids is None else token_ids
        if tree.spec.structure is not None and self._grammars is not None:
            tree.follow(self._grammars.follower(tree.spec.structure))
        sequence = self.cache.open(tree, tenant=tree.tenant)
        try:
            if self.shares_prefixes:
                sequence.adopt(token_ids)
            # The sequence takes its own blocks with its first slice: until then, other sequences
            # may store more KV that it can share.
            sequence.check_room(tree.num_committed)
        except BaseException:
            self.cache.close(tree)
            raise
        stopper = Stopper(tree.stopping, self._stopping)
        return sequence, Growth(tree, self._chances[tree.spec.rule], stopper)


class ModelProposer:
    """Draws candidates from the model's own distribution, as each sequence's rule asks.

    Under the coupled rule it draws with the target's noise. The first candidates are then the text
    that the target would choose if it had this model's logits.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        prefix_cache: bool = True,
        grammars: Grammars | None = None,
        translation: Translation | None = None,
        learns: bool = False,
    ) -> None:
        """`prefix_cache`, `grammars`: see OnEngine. `translation`: to another vocabulary. `learns`:
        from each tenant's texts.
        """
        self._engine = engine
        self._online = OnlineLearning() if learns else None
        self._translation = translation
        target = None if translation is None else translation.target
        self._own = OnEngine(
            engine,
            MODEL,
            prefix_cache=prefix_cache,
            grammars=grammars,
            vocabulary=None if target is None else (target.size, target.digest),
        )
        self._held: dict[DraftTree, _Held] = {}
        # Those since the last pass, so that one call makes them for all trees.
        self._moves: dict[DraftTree, KvMoves] = {}

    @property
    def info(self) -> DrafterInfo:
        return self._own.info

    def open(self, tree: DraftTree) -> None:
        pair = self._translation
        text = SameText(tree) if pair is None else TranslatedText(pair, tree)
        sequence, growth = self._own.open(tree, final_tokens(text))
        self._held[tree] = _Held(TreeKv(sequence, text), growth)

    def settle(self, tree: DraftTree, count: int) -> None:
        text = self._held[tree].kv.text
        if isinstance(text, TranslatedText):
            text.read(tree, tree.num_settled + count)

    def close(self, tree: DraftTree) -> None:
        del self._held[tree]
        self._moves.pop(tree, None)
        if self._online is not None:
            self._online.close(tree)
        self._own.cache.close(tree)

    def committed(self, tree: DraftTree, kept: Kept, top_tokens: Sequence[TopTokens]) -> None:
        held = self._held[tree]
        held.kv.forget_unstored()
        moves = held.kv.moves(kept)
        if moves:
            if tree in self._moves:
                self._move_kv()
            self._moves[tree] = list(held.kv.block_table), moves
        held.kv.keep(kept)
        held.kv.commit(tree, kept)
        self._offer(held.kv)
        held.growth.committed(kept)
        if self._online is not None:
            self._online.committed(tree, kept)

    def learn(self) -> bool:
        """See Learns."""
        return self._online is not None and self._online.learn()

    def at_hand(self, tree: DraftTree) -> NewNodes:
        return self._held[tree].growth.at_hand()

    def promise(self, tree: DraftTree) -> float:
        return self._held[tree].growth.promise()

    def run_pass(self, trees: Sequence[DraftTree], *, pass_ms: float) -> Pass:
        result = Pass()
        self._move_kv()
        turns = self._choose(trees, result, pass_ms)
        fed = [turn for turn in turns if turn.piece is not None]
        failed = self._feed(fed, result) if fed else set()
        for turn in turns:
            result.took_part.append(turn.tree)
            if turn.tree not in failed and (turn.nodes or turn.piece is None):
                growth = self._held[turn.tree].growth
                try:
                    new = growth.harvest(turn.nodes, pass_ms=pass_ms)
                    if (draft := growth.draft_of(turn.nodes, new)) is not None:
                        result.drafts.append(draft)
                except Exception as error:  # Of one sequence: others go on.
                    result.fail(turn.tree, error)
        return result

    def _move_kv(self) -> None:
        if self._moves:
            self._engine.move_kv(list(self._moves.values()))
            self._moves.clear()

    def _feed(self, turns: Sequence[_Turn], result: Pass) -> set[DraftTree]:
        """Run the model and draw from its logits. Returns the trees for which drawing failed."""
        logits_TV = self._engine.step([turn.piece for turn in turns if turn.piece is not None])
        if self._translation is not None:
            logits_TV = self._translation.rows(logits_TV)
        fed: list[tuple[DraftTree, Growth, int]] = []
        for turn in turns:
            assert turn.piece is not None
            held = self._held[turn.tree]
            held.kv.mark_stored(len(turn.piece.token_ids))
            self._offer(held.kv)
            result.tokens_fed += len(turn.piece.token_ids)
            result.fed[turn.tree] = len(turn.piece.token_ids)
            fed += [(turn.tree, held.growth, node) for node in turn.nodes]
        if self._online is not None:
            logits_TV = self._online.corrected(logits_TV, [(tree, node) for tree, _, node in fed])
        failed: dict[DraftTree, Exception] = {}
        if logits_TV.device.type != "cpu":
            failed = dict(expand_on_device(logits_TV, fed)) if fed else {}
        else:
            for row, (tree, growth, node) in enumerate(fed):
                try:
                    growth.expand(node, logits_TV[row])
                except Exception as error:  # Of one sequence: others go on.
                    failed[tree] = error
        for tree, why in failed.items():
            result.fail(tree, why)
        return set(failed)

    def check_integrity(self, trees: Sequence[DraftTree]) -> None:
        self._own.cache.check_integrity()
        assert set(self._held) == set(trees), "a sequence was leaked or lost"
        for tree, held in self._held.items():
            held.kv.check_integrity(tree)
            held.growth.check_integrity()

    def _choose(self, trees: Sequence[DraftTree], result: Pass, pass_ms: float) -> list[_Turn]:
        """Each tree's part in this pass.

        All trees with at most SHORT tokens without KV are fed. Of the others, the oldest one gets a
        chunk of its prefill. A tree for which the pool has no block left is declined.
        """
        turns: list[_Turn] = []
        prefilling: list[DraftTree] = []
        for tree in trees:
            held = self._held[tree]
            try:
                held.kv.forget_unstored()
                length = len(held.kv.text.token_ids)
                if not 0 < length <= self._engine.max_model_len - tree.room(ROOT):
                    why = f"its text has {length} tokens of the drafter's, whose context they fill"
                    result.declined.append((tree, why))
                    continue
                nodes = held.growth.to_feed(pass_ms=pass_ms)
                if self._own.shares_prefixes and nodes == [ROOT]:
                    held.kv.adopt()
            except Exception as error:  # Of one sequence: others go on.
                result.fail(tree, error)
                continue
            if not nodes:
                turns.append(_Turn(tree, None, []))
                continue
            if held.kv.missing <= SHORT:
                self._take(turns, result, tree, nodes, limit=None)
            else:
                prefilling.append(tree)
        if prefilling:
            result.prefilled = True
            beside = any(turn.piece is not None for turn in turns)
            limit = PREFILL_BESIDE if beside else PREFILL_ALONE
            self._take(turns, result, prefilling[0], [ROOT], limit=limit)
        return turns

    def _offer(self, kv: TreeKv) -> None:
        if self._own.shares_prefixes:
            kv.offer()

    def _take(
        self,
        turns: list[_Turn],
        result: Pass,
        tree: DraftTree,
        nodes: list[int],
        *,
        limit: int | None,
    ) -> None:
        kv = self._held[tree].kv
        try:
            if nodes != [ROOT]:
                piece = kv.node_slice(tree, nodes)
            else:
                if kv.missing == 0:
                    kv.forget_root()  # when its logits came, the grant did not allow to use them
                piece = kv.committed_slice(limit=limit)
        except OverloadedError as error:
            result.short.append((tree, f"the drafter's KV memory is full: {error}"))
            return
        except Exception as error:  # Of one sequence: others go on.
            result.fail(tree, error)
            return
        turns.append(_Turn(tree, piece, nodes if piece.num_logits else []))


Failure = tuple[DraftTree, Exception]
_Fed = tuple[DraftTree, Growth, int]


def expand_on_device(logits_TV: Tensor, fed: Sequence[_Fed]) -> list[Failure]:
    """Expand the node of each row. Returns the failures, each of which concerns one tree only.

    Waits for the device, once per distinct target vocabulary size.
    """
    sizes = {tree.vocab_size for tree, _, _ in fed}
    if len(sizes) == 1:
        return _expand(logits_TV[:, : fed[0][0].vocab_size], fed)
    failures: list[Failure] = []
    for size in sizes:
        rows = [row for row, (tree, _, _) in enumerate(fed) if tree.vocab_size == size]
        failures += _expand(_pick(logits_TV, rows)[:, :size], [fed[row] for row in rows])
    return failures


def _expand(logits_TV: Tensor, fed: Sequence[_Fed]) -> list[Failure]:
    """Copies to the host only what a node needs: a token, its best tokens, or a row of logits."""
    drawn = [row for row, (_, growth, _) in enumerate(fed) if growth.needs_token_alone]
    ranked = [row for row, (_, growth, _) in enumerate(fed) if growth.needs_best_tokens]
    copied = [row for row in range(len(fed)) if row not in {*drawn, *ranked}]
    wanted: list[Tensor] = []
    if drawn:
        wanted += choose_tokens(_pick(logits_TV, drawn), [_row_of(fed[row]) for row in drawn])
    if ranked:
        width = max(fed[row][1].width for row in ranked)
        rows = [_row_of(fed[row]) for row in ranked]
        best = best_tokens(_pick(logits_TV, ranked), rows, width)
        wanted += [best.largest_R, best.token_ids_RK, best.scores_RK, best.logits_RK]
    if copied:
        wanted.append(_pick(logits_TV, copied))
    copies = to_host(*wanted) if wanted else []
    failures: list[Failure] = []
    if drawn:
        token_ids, largest = (one.tolist() for one in copies[:2])
        for row, token_id, logit in zip(drawn, token_ids, largest, strict=True):
            tree, growth, node = fed[row]
            with _noting(tree, failures):
                check_likeliest(token_id, logit, logits_TV.shape[1])
                growth.expand_chain(node, token_id)
    if ranked:
        found = copies[-5:-1] if copied else copies[-4:]
        for row, logit, *best_K in zip(ranked, *found, strict=True):
            tree, growth, node = fed[row]
            with _noting(tree, failures):
                check_likeliest(int(best_K[0][0]), float(logit), logits_TV.shape[1])
                growth.expand_best(node, *(one.numpy() for one in best_K))
    for row, logits_V in zip(copied, copies[-1] if copied else (), strict=True):
        tree, growth, node = fed[row]
        with _noting(tree, failures):
            growth.expand(node, logits_V)
    return failures


@contextmanager
def _noting(tree: DraftTree, failures: list[Failure]) -> Iterator[None]:
    """Notes an error as the failure of this tree."""
    try:
        yield
    except Exception as error:  # Of one sequence: others go on.
        failures.append((tree, error))


def _row_of(fed: _Fed) -> Row:
    tree, _, node = fed
    return Row(tree.spec, tree.prefix(node))


def _pick(logits_TV: Tensor, rows: list[int]) -> Tensor:
    return logits_TV.index_select(0, to_device(np.array(rows), logits_TV.device))

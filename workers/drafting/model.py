"""Drafting with a small model: one token a sequence a forward pass, all open sequences together."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import OverloadedError
from paceline.rules import Rule
from workers.drafting.proposer import Draft, DrafterInfo, Pass, TopTokens
from workers.drafting.tree import DraftTree, Kept, NewNodes
from workers.engine.engine import Engine, Slice
from workers.engine.local_cache import LocalCache, LocalSequence
from workers.verification.coupled import choose_token

PREFILL_ALONE = 128
"""Most prompt tokens that a pass feeds while no sequence is drafting."""
PREFILL_BESIDE = 32
"""The same while others draft: their next token waits for it."""
SHORT = 16
"""So many missing tokens are no prefill: what a verdict added is fed at once."""


class ModelProposer:
    """Draws each token by the coupled rule's noise from the model's own distribution.

    So a draft is what the target would choose if it had this model's logits.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._cache = LocalCache(engine.num_blocks, engine.block_size)
        self._sequences: dict[DraftTree, LocalSequence] = {}

    @property
    def info(self) -> DrafterInfo:
        info = self._engine.info
        return DrafterInfo(
            kind="model",
            model=info.name,
            vocab_size=info.vocab_size,
            vocabulary_digest=info.vocabulary_digest,
            max_position=self._engine.max_model_len,
            rules=frozenset({Rule.COUPLED}),
        )

    def open(self, tree: DraftTree) -> None:
        sequence = self._cache.open(tree)
        try:
            sequence.extend(tree.committed)
        except OverloadedError:
            self._cache.close(tree)
            raise
        self._sequences[tree] = sequence

    def close(self, tree: DraftTree) -> None:
        del self._sequences[tree]
        self._cache.close(tree)

    def committed(self, tree: DraftTree, kept: Kept, top_tokens: Sequence[TopTokens]) -> None:
        sequence = self._sequences[tree]
        text = tree.prefix(tree.end)
        same = next((i for i, (a, b) in enumerate(zip(text, sequence.token_ids)) if a != b), None)
        if same is not None:
            sequence.truncate_to(same)

    def run_pass(self, trees: Sequence[DraftTree], *, pass_ms: float) -> Pass:
        result = Pass()
        slices: list[Slice] = []
        for tree, limit in self._choose(trees, result):
            slices.append(self._sequences[tree].pending_slice(limit=limit))
            result.took_part.append(tree)
        if not slices:
            return result
        logits_TV = self._engine.step(slices)
        row = 0
        for tree, piece in zip(result.took_part, slices, strict=True):
            self._sequences[tree].mark_stored(len(piece.token_ids))
            result.tokens_fed += len(piece.token_ids)
            if piece.num_logits:
                token_id = choose_token(logits_TV[row], tree.spec, tree.prefix(tree.end))
                result.drafts.append(Draft(tree, NewNodes((token_id,))))
                row += 1
        return result

    def check_integrity(self, trees: Sequence[DraftTree]) -> None:
        self._cache.check_integrity()
        assert set(self._sequences) == set(trees), "a sequence was leaked or lost"
        for tree, sequence in self._sequences.items():
            held = sequence.token_ids
            assert held == tree.prefix(tree.end)[: len(held)], "KV is of other tokens than the tree"

    def _choose(
        self, trees: Sequence[DraftTree], result: Pass
    ) -> list[tuple[DraftTree, int | None]]:
        """The trees of this pass and how many tokens of each to feed (None: all that miss).

        Those that miss little are all taken; of the others the oldest gets a chunk. A tree for
        which the pool has no block left is declined.
        """
        chosen: list[tuple[DraftTree, int | None]] = []
        prefilling: list[DraftTree] = []
        for tree in trees:
            sequence = self._sequences[tree]
            try:
                sequence.extend(tree.prefix(tree.end)[len(sequence) :])
            except OverloadedError as error:
                result.declined.append((tree, f"the drafter's KV memory is full: {error}"))
                continue
            if sequence.num_pending <= SHORT:
                chosen.append((tree, None))
            else:
                prefilling.append(tree)
        if prefilling:
            chosen.append((prefilling[0], PREFILL_BESIDE if chosen else PREFILL_ALONE))
        return chosen

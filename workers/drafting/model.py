"""Drafting with a small model: one token a sequence a forward pass, all open sequences together."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import OverloadedError
from workers.drafting.path import DraftPath
from workers.drafting.proposer import Draft, DrafterInfo, Pass
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
        self._sequences: dict[DraftPath, LocalSequence] = {}

    @property
    def info(self) -> DrafterInfo:
        info = self._engine.info
        return DrafterInfo(
            kind="model",
            model=info.name,
            vocab_size=info.vocab_size,
            vocabulary_digest=info.vocabulary_digest,
            max_position=self._engine.max_model_len,
        )

    def open(self, path: DraftPath) -> None:
        sequence = self._cache.open(path)
        try:
            sequence.extend(path.token_ids)
        except OverloadedError:
            self._cache.close(path)
            raise
        self._sequences[path] = sequence

    def close(self, path: DraftPath) -> None:
        del self._sequences[path]
        self._cache.close(path)

    def committed(self, path: DraftPath, *, kept: int) -> None:
        sequence = self._sequences[path]
        if kept < len(sequence):
            sequence.truncate_to(kept)

    def run_pass(self, paths: Sequence[DraftPath]) -> Pass:
        result = Pass()
        slices: list[Slice] = []
        for path, limit in self._choose(paths, result):
            slices.append(self._sequences[path].pending_slice(limit=limit))
            result.took_part.append(path)
        if not slices:
            return result
        logits_TV = self._engine.step(slices)
        row = 0
        for path, piece in zip(result.took_part, slices, strict=True):
            self._sequences[path].mark_stored(len(piece.token_ids))
            result.tokens_fed += len(piece.token_ids)
            if piece.num_logits:
                token_id = choose_token(logits_TV[row], path.spec, path.token_ids)
                result.drafts.append(Draft(path, (token_id,)))
                row += 1
        return result

    def check_integrity(self, paths: Sequence[DraftPath]) -> None:
        self._cache.check_integrity()
        assert set(self._sequences) == set(paths), "a sequence was leaked or lost"
        for path, sequence in self._sequences.items():
            held = sequence.token_ids
            assert held == path.token_ids[: len(held)], "KV is of other tokens than the path"

    def _choose(
        self, paths: Sequence[DraftPath], result: Pass
    ) -> list[tuple[DraftPath, int | None]]:
        """The paths of this pass and how many tokens of each to feed (None: all that miss).

        Those that miss little are all taken; of the others the oldest gets a chunk. A path for
        which the pool has no block left is declined.
        """
        chosen: list[tuple[DraftPath, int | None]] = []
        prefilling: list[DraftPath] = []
        for path in paths:
            sequence = self._sequences[path]
            try:
                sequence.extend(path.token_ids[len(sequence) :])
            except OverloadedError as error:
                result.declined.append((path, f"the drafter's KV memory is full: {error}"))
                continue
            if sequence.num_pending <= SHORT:
                chosen.append((path, None))
            else:
                prefilling.append(path)
        if prefilling:
            chosen.append((prefilling[0], PREFILL_BESIDE if chosen else PREFILL_ALONE))
        return chosen

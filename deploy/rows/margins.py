"""Measures how close two tokens were in plain decoding, with the target's engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.sampling import SequenceSpec
from workers.engine.cpu.engine import Engine, Slice
from workers.engine.kv_blocks import blocks_for
from workers.models.catalog import ModelFiles
from workers.verification.choice import noise_of
from workers.verification.distribution import adjusted_logits, distribution_of
from workers.verification.prefix import Prefix

_KV_BYTES = 1 << 30
_CHUNK = 512


class MarginMeter:
    """The target's engine, for one sequence at a time and without candidates."""

    def __init__(self, files: ModelFiles, *, threads: int) -> None:
        self._engine = Engine(
            files.folder, weights=files.weights, threads=threads, kv_memory_bytes=_KV_BYTES
        )

    def margin(
        self, spec: SequenceSpec, prefix: Sequence[int], expected: int, got: int
    ) -> float | None:
        """By how much plain decoding prefers `expected` to `got` after `prefix`, in logits.

        At a temperature above 0 it includes the noise of the position. None: one of the two could
        not have been chosen.
        """
        logits_V = self._logits_V(prefix)
        position = len(prefix)
        before = Prefix.of(prefix, prompt_length=spec.prompt_length)
        adjusted_V = adjusted_logits(logits_V, spec, before)
        if spec.sampling.greedy:
            gap = float(adjusted_V[expected]) - float(adjusted_V[got])
            return gap if np.isfinite(gap) else None
        kept = distribution_of(adjusted_V, spec.sampling)
        scores_N = kept.log_weights + noise_of(kept, adjusted_V.size, spec, position)
        ids = np.arange(adjusted_V.size) if kept.token_ids is None else kept.token_ids
        found = [scores_N[ids == token_id] for token_id in (expected, got)]
        if not all(scores.size for scores in found):
            return None
        return float(found[0][0] - found[1][0]) * spec.sampling.temperature

    def _logits_V(self, prefix: Sequence[int]) -> NDArray[np.float32]:
        blocks = range(blocks_for(len(prefix), self._engine.block_size))
        for start in range(0, len(prefix), _CHUNK):
            fed = list(prefix[start : start + _CHUNK])
            logits_1V = self._engine.step([Slice(blocks, start, fed, 1)])
        return logits_1V[0].numpy()

"""Tiny language models that answer any prefix, and plain decoding with them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from paceline.sampling import SamplingParams, SequenceSpec
from tests.workers.verification import naive
from workers.verification.candidates import CandidateTree

SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "greedy penalties": SamplingParams(
        temperature=0.0, repetition_penalty=1.8, presence_penalty=0.7, frequency_penalty=0.9
    ),
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.4),
    "cut": SamplingParams(temperature=1.5, top_k=3, top_p=0.85, min_p=0.1),
    "penalties": SamplingParams(
        repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=-0.6, top_p=0.9
    ),
    "minimum": SamplingParams(min_tokens=3, logit_bias={1: 0.8, 2: -0.5}),
    "bad words": SamplingParams(logit_bias={1: 0.5}),
}
BAD_WORDS = ((2, 1), (1, 1, 2), (2, 2, 2, 2))
"""Of the sampling with this name. All but the last are common among three tokens."""


class TableModel:
    """A language model over a tiny vocabulary, with random logits made on demand."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self.vocab_size = vocab_size
        self._seed = seed
        self._rows: dict[tuple[int, ...], torch.Tensor] = {}

    def logits_V(self, prefix: Sequence[int]) -> torch.Tensor:
        key = tuple(prefix)
        if key not in self._rows:
            rng = np.random.default_rng([self._seed, *key])
            row = rng.standard_normal(self.vocab_size) * 1.5
            self._rows[key] = torch.from_numpy(row.astype(np.float32))
        return self._rows[key]

    def logits_TV(self, prefix: Sequence[int], candidates: Sequence[int]) -> torch.Tensor:
        """Row i follows prefix + candidates[:i], as in an engine's step."""
        return self.logits_RV(prefix, CandidateTree.chain(candidates))

    def logits_RV(self, prefix: Sequence[int], tree: CandidateTree) -> torch.Tensor:
        """Row 0 follows the prefix, row i + 1 candidate i and its ancestors."""
        paths = [list(prefix)]
        for token_id, parent in zip(tree.token_ids, tree.parents, strict=True):
            paths.append([*paths[parent], token_id])
        return torch.stack([self.logits_V(path) for path in paths])


def spec_of(name: str, seed: int, prompt_length: int) -> SequenceSpec:
    """The spec of one of SAMPLINGS. Token 0 ends a sequence."""
    words = BAD_WORDS if name == "bad words" else ()
    return SequenceSpec(SAMPLINGS[name], seed, prompt_length, end_token_ids=(0,), bad_words=words)


def plain(model: TableModel, spec: SequenceSpec, prompt: Sequence[int], length: int) -> list[int]:
    """Decode with the naive rule. Prompt and output have `length` tokens together."""
    tokens = list(prompt)
    while len(tokens) < length:
        tokens.append(naive.choose(model.logits_V(tokens).tolist(), spec, tokens))
    return tokens

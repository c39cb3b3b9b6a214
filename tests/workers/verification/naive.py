"""The coupled rule again, token by token in plain Python. The fast one must equal it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from paceline.sampling import SequenceSpec
from tests.workers.verification.reference_noise import gumbel_noise_V
from workers.verification.candidates import CandidateTree
from workers.verification.verify import Verdict, verify


def verify_tree(
    logits_RV: torch.Tensor, tree: CandidateTree, spec: SequenceSpec, prefix: Sequence[int]
) -> Verdict:
    """The fast rule, which must equal this one."""
    return verify("coupled", logits_RV, tree, spec, prefix)


def verify_chain(
    logits_TV: torch.Tensor, candidates: Sequence[int], spec: SequenceSpec, prefix: Sequence[int]
) -> Verdict:
    """The fast rule on a chain."""
    return verify_tree(logits_TV, CandidateTree.chain(candidates), spec, prefix)


def adjusted(logits: Sequence[float], spec: SequenceSpec, prefix: Sequence[int]) -> list[float]:
    """Bias, repetition, presence and frequency penalties, min_tokens, bad words, in float64."""
    sampling = spec.sampling
    row = [logit + sampling.logit_bias.get(i, 0.0) for i, logit in enumerate(logits)]
    for i in set(prefix):
        penalty = sampling.repetition_penalty
        row[i] = row[i] * penalty if row[i] < 0 else row[i] / penalty
    output = prefix[spec.prompt_length :]
    for i, count in Counter(output).items():
        row[i] -= sampling.presence_penalty + sampling.frequency_penalty * count
    if len(output) < sampling.min_tokens:
        for i in spec.end_token_ids:
            row[i] = -math.inf
    for i in range(len(row)):
        if any([*output, i][-len(word) :] == list(word) for word in spec.bad_words):
            row[i] = -math.inf
    return row


def kept_tokens(row: Sequence[float], spec: SequenceSpec) -> dict[int, float]:
    """Token id to its log weight after temperature, top-k, top-p and min-p."""
    sampling = spec.sampling
    largest = max(row)
    kept = {i: (logit - largest) / sampling.temperature for i, logit in enumerate(row)}
    if 0 < sampling.top_k < len(kept):
        kth = sorted(kept.values(), reverse=True)[sampling.top_k - 1]
        kept = {i: w for i, w in kept.items() if w >= kth}
    if sampling.top_p < 1:
        wanted = sampling.top_p * sum(math.exp(w) for w in kept.values())
        nucleus: dict[int, float] = {}
        reached = 0.0
        for i in sorted(kept, key=lambda i: (-kept[i], i)):
            if reached >= wanted:
                break
            nucleus[i] = kept[i]
            reached += math.exp(kept[i])
        kept = nucleus
    return {i: w for i, w in kept.items() if math.exp(w) >= sampling.min_p and w > -math.inf}


def probabilities(row: Sequence[float], spec: SequenceSpec) -> dict[int, float]:
    """Token id to its exact probability."""
    weights = {i: math.exp(w) for i, w in kept_tokens(row, spec).items()}
    return {i: w / sum(weights.values()) for i, w in weights.items()}


def choose(logits: Sequence[float], spec: SequenceSpec, prefix: Sequence[int]) -> int:
    """The token of plain decoding."""
    row = adjusted(logits, spec, prefix)
    if spec.sampling.temperature == 0:
        return row.index(max(row))
    noise_V = gumbel_noise_V(
        seed=spec.seed,
        position=len(prefix),
        vocab_size=len(row),
        sample_index=spec.sample_index,
    ).astype(np.float64)
    kept = kept_tokens(row, spec)
    return max(kept, key=lambda i: (kept[i] + noise_V[i], -i))

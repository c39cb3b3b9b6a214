"""Draws the candidates under one node from a model's logits, rule by rule."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.sampling import SequenceSpec
from workers.drafting.expansions import Children
from workers.verification.candidates import SparseProbs
from workers.verification.choice import choose_token
from workers.verification.draws import (
    cut_draft_probs,
    draw_chain_token,
    draw_independent,
    draw_without_replacement,
    of_node,
    top_children,
)
from workers.verification.noise import Stream, gumbel, words_of
from workers.verification.rule import CandidateKind, rule_named


def draw_one(
    logits_V: torch.Tensor, spec: SequenceSpec, prefix: Sequence[int], *, prefix_hash: int
) -> Children:
    """Draw the candidate of a chain. `prefix_hash` is that of `prefix` (paceline.prefix_hash)."""
    if rule_named(spec.rule).shares_noise:
        return Children((choose_token(logits_V, spec, prefix),), (0.0,))
    kept = cut_draft_probs(logits_V, spec, prefix)
    token_ids = (draw_chain_token(kept, of_node(spec, prefix_hash), len(prefix)),)
    return Children(token_ids, _surprises(kept, token_ids), kept, ((0,),))


def draw_children(
    logits_V: torch.Tensor,
    spec: SequenceSpec,
    prefix: Sequence[int],
    num_children: int,
    *,
    prefix_hash: int,
) -> Children:
    """Draw the children of a tree node, with shared noise, without or with replacement."""
    drawn_as = rule_named(spec.rule).drawn_as
    if drawn_as is CandidateKind.SHARED_NOISE:
        token_ids = top_children(logits_V, spec, prefix, num_children)
        logits_K = logits_V[torch.tensor(token_ids)].numpy()
        return Children(token_ids, gaps_of(logits_K, spec, len(prefix), token_ids))
    kept = cut_draft_probs(logits_V, spec, prefix)
    own = of_node(spec, prefix_hash)
    if drawn_as is CandidateKind.WITHOUT_REPLACEMENT:
        token_ids = draw_without_replacement(kept, own, len(prefix), num_children)
    else:
        assert drawn_as is CandidateKind.WITH_REPLACEMENT, spec.rule
        token_ids = draw_independent(kept, own, len(prefix), range(num_children))
    return Children(token_ids, _surprises(kept, token_ids), kept)


def draw_paths(
    logits_V: torch.Tensor,
    spec: SequenceSpec,
    prefix: Sequence[int],
    numbers: Sequence[int],
    *,
    prefix_hash: int,
) -> Children:
    """Draw the continuations of the independent paths `numbers`, and merge equal ones."""
    kept = cut_draft_probs(logits_V, spec, prefix)
    through: dict[int, list[int]] = {}
    drawn = draw_independent(kept, of_node(spec, prefix_hash), len(prefix), numbers)
    for number, token_id in zip(numbers, drawn, strict=True):
        through.setdefault(token_id, []).append(number)
    token_ids = tuple(through)
    paths = tuple(tuple(numbers) for numbers in through.values())
    return Children(token_ids, _surprises(kept, token_ids), kept, paths)


def _surprises(kept: SparseProbs, token_ids: Sequence[int]) -> tuple[float, ...]:
    exact = kept.exact()
    return tuple(-math.log(exact.prob_of(token_id)) for token_id in token_ids)


def gaps_of(
    logits_K: NDArray[np.float32], spec: SequenceSpec, position: int, token_ids: Sequence[int]
) -> tuple[float, ...]:
    """The gaps of children with shared noise, from their logits (see chances.coupled_prior).

    These are the logits without bias and penalties: an estimate need not be exact.
    """
    scores = logits_K.astype(float)
    if not spec.sampling.greedy:
        stream = Stream(spec.seed, position, spec.sample_index)
        noise = gumbel(words_of(stream, np.array(token_ids)))
        scores = scores / spec.sampling.temperature + noise
    gaps = [max(float(scores[0] - score), 0.0) for score in scores]
    gaps[0] = gaps[1] if len(gaps) > 1 else math.inf
    return tuple(gaps)

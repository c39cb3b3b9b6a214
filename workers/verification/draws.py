"""Draws candidates from a drafter's distribution, for each kind of candidates (CandidateKind).

For a rule that tosses coins, a drafter draws with noise of its own (Purpose.DRAFTING), from its
distribution cut to the likeliest tokens. `cut_draft_probs` returns the pairs of token id and
probability that it draws from and sends. For the coupled rule it draws with the target's noise, and
sends only tokens.

Under the coupled rule all candidates of a position must share the position's noise. Under a rule
that tosses coins, each prefix needs noise of its own (`of_node`). Earlier draws decide where a
draft continues and where it stops, including draws at the same position after another prefix. If
the next draws depended on these, the law of the output would change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.sampling import SequenceSpec
from workers.verification.candidates import CandidateTree, SparseProbs
from workers.verification.choice import choose_from, noise_of
from workers.verification.distribution import (
    Distribution,
    WindowRows,
    distribution_of,
    likeliest_token,
)
from workers.verification.noise import Purpose

NUM_KEPT = 64
"""Number of pairs of a draft distribution that are kept and sent."""


def cut_draft_probs(
    logits_V: torch.Tensor, spec: SequenceSpec, prefix: Sequence[int], *, num_kept: int = NUM_KEPT
) -> SparseProbs:
    """A drafter's distribution after `prefix`, cut to its likeliest tokens and renormalized.

    `logits_V` is a float32 CPU tensor [V]; the request's sampling parameters apply to it as to the
    target's. Tokens whose float32 probability is 0 are left out. Raises as choose_token does.
    """
    adjusted_V = _adjusted(logits_V, spec, prefix)
    if spec.sampling.greedy:
        token_ids = np.array([likeliest_token(adjusted_V)], dtype=np.int64)
        return SparseProbs(token_ids, np.ones(1, dtype=np.float32))
    kept = distribution_of(adjusted_V, spec.sampling)
    kept = kept.at(np.sort(_largest(kept.log_weights, num_kept)))
    weights_M = np.exp(kept.log_weights, dtype=np.float64)
    probs_M = (weights_M / weights_M.sum()).astype(np.float32)
    positive = np.flatnonzero(probs_M > 0)
    assert kept.token_ids is not None
    return SparseProbs(kept.token_ids[positive], probs_M[positive])


def of_node(spec: SequenceSpec, prefix_hash: int) -> SequenceSpec:
    """The spec with a seed for the draws after one prefix, which its 64-bit hash identifies.

    So a draft is a function of the request's seed and of the tokens before it. Any process that
    repeats the draft gets the same tokens.
    """
    return replace(spec, seed=spec.seed ^ prefix_hash)


def draw_chain_token(draft: SparseProbs, spec: SequenceSpec, position: int) -> int:
    """One draw: the candidate of a chain at `position`."""
    return draw_independent(draft, spec, position, (0,))[0]


def draw_independent(
    draft: SparseProbs, spec: SequenceSpec, position: int, numbers: Sequence[int]
) -> tuple[int, ...]:
    """One independent draw for each of `numbers`: children, or continuations of paths.

    A path has the same number at all its positions, and different paths have different numbers.
    """
    kept = _logs(draft)
    return tuple(
        # The bound on the vocabulary only limits the ids for which noise is computed. It does not
        # change the noise.
        choose_from(kept, _bound(draft), spec, position, purpose=Purpose.DRAFTING, candidate=number)
        for number in numbers
    )


def draw_without_replacement(
    draft: SparseProbs, spec: SequenceSpec, position: int, num_children: int
) -> tuple[int, ...]:
    """Different tokens, in the order drawn: those with the largest log draft_probs + noise.

    This is sampling without replacement (Kool et al. 2019). The result has fewer than
    `num_children` tokens if the distribution has fewer.
    """
    kept = _logs(draft)
    scores_M = kept.log_weights + noise_of(
        kept, _bound(draft), spec, position, purpose=Purpose.DRAFTING
    )
    return tuple(draft.token_ids_M[_largest(scores_M, num_children)].tolist())


def top_children(
    logits_V: torch.Tensor, spec: SequenceSpec, prefix: Sequence[int], num_children: int
) -> tuple[int, ...]:
    """Candidates for the coupled rule: those with the largest log draft_probs + target's noise.

    The candidate likeliest to be the target's token comes first; `choose_token` returns the same
    one. There are fewer than `num_children` if the sampling parameters leave fewer tokens. At
    temperature 0 the candidates are the tokens with the largest logits.
    """
    adjusted_V = _adjusted(logits_V, spec, prefix)
    if spec.sampling.greedy:
        likeliest_token(adjusted_V)  # raises if there is none
        best = _largest(adjusted_V, num_children)
        return tuple(best[adjusted_V[best] > -np.inf].tolist())
    kept = distribution_of(adjusted_V, spec.sampling)
    scores_N = kept.log_weights + noise_of(kept, adjusted_V.size, spec, len(prefix))
    best = _largest(scores_N, num_children)
    best = best[scores_N[best] > -np.inf]
    return tuple((best if kept.token_ids is None else kept.token_ids[best]).tolist())


def _adjusted(
    logits_V: torch.Tensor, spec: SequenceSpec, prefix: Sequence[int]
) -> NDArray[np.float32]:
    no_candidates = CandidateTree((), ())
    return WindowRows(logits_V[None], no_candidates, spec, prefix).adjusted_V(0, ())


def _logs(draft: SparseProbs) -> Distribution:
    with np.errstate(divide="ignore"):  # a pair may have probability 0 and is then never drawn
        log_weights_M = np.log(draft.probs_M.astype(np.float64))
    log_weights_M -= log_weights_M.max()
    return Distribution(draft.token_ids_M, log_weights_M.astype(np.float32))


def _bound(draft: SparseProbs) -> int:
    return int(draft.token_ids_M[-1]) + 1


def _largest(values_N: NDArray[np.float32], num: int) -> NDArray[np.int64]:
    """The indices of the largest values, largest first; among equal values the lowest indices."""
    num = min(num, values_N.size)
    if num == 0:
        return np.empty(0, dtype=np.int64)
    smallest = np.partition(values_N, values_N.size - num)[values_N.size - num]
    indices = np.flatnonzero(values_N >= smallest)
    return indices[np.argsort(-values_N[indices], kind="stable")[:num]]

"""What a drafter draws from its distribution, and the uniforms behind the draws."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from paceline.sampling import SamplingParams, SequenceSpec
from tests.workers.verification.chi_square import follows
from tests.workers.verification.reference_noise import gumbel_noise_V, philox_4x32
from tests.workers.verification.table_model import SAMPLINGS, spec_of
from workers.verification.candidates import SparseProbs
from workers.verification.choice import choose_token
from workers.verification.draws import (
    cut_draft_probs,
    draw_independent,
    draw_without_replacement,
    top_children,
)
from workers.verification.noise import Purpose, uniforms_N

SAMPLING = SamplingParams(temperature=1.2, repetition_penalty=1.3)


def test_cut_probabilities_are_the_largest_and_sum_to_1() -> None:
    """64 of 3,000, ascending, as float32; so no malformed pair is possible."""
    rng = np.random.default_rng(1)
    logits_V = torch.from_numpy((rng.standard_normal(3_000) * 3).astype(np.float32))
    spec = SequenceSpec(SamplingParams(temperature=0.8), seed=1, prompt_length=1)
    cut = cut_draft_probs(logits_V, spec, [5])
    cut.check(vocab_size=3_000, node=0)
    assert cut.probs_M.dtype == np.float32
    assert set(cut.token_ids_M.tolist()) == set(np.argsort(-logits_V.numpy())[:64].tolist())
    weights_M = np.exp(logits_V.numpy()[cut.token_ids_M].astype(np.float64) / 0.8)
    assert np.allclose(cut.probs_M, weights_M / weights_M.sum(), rtol=1e-5)
    greedy = replace(spec, sampling=SamplingParams(temperature=0.0))
    one = cut_draft_probs(logits_V, greedy, [5])
    assert one.token_ids_M.tolist() == [int(logits_V.argmax())]
    assert one.probs_M.tolist() == [1.0]


def test_coupled_children_begin_with_the_token_itself() -> None:
    """They are in the order of log draft_probs + noise; at temperature 0, in that of the logits."""
    rng = np.random.default_rng(2)
    for seed in range(200):
        spec = spec_of(list(SAMPLINGS)[seed % len(SAMPLINGS)], seed, 2)
        logits_V = torch.from_numpy((rng.standard_normal(50) * 2).astype(np.float32))
        prefix = rng.integers(0, 50, 4).tolist()
        children = top_children(logits_V, spec, prefix, 4)
        assert children[0] == choose_token(logits_V, spec, prefix)
        assert len(set(children)) == len(children) <= 4
        if spec.sampling == SAMPLINGS["plain"]:
            scores_V = logits_V.numpy() + gumbel_noise_V(seed=seed, position=4, vocab_size=50)
            assert children == tuple(np.argsort(-scores_V)[:4].tolist())
    tied = torch.tensor([0.0, 2.0, 1.0, 2.0, -math.inf])
    assert top_children(tied, spec_of("greedy", 0, 1), [0], 9) == (1, 3, 2, 0)


def _independent(seed: int, cut: SparseProbs, spec: SequenceSpec) -> tuple[int, ...]:
    return draw_independent(cut, replace(spec, seed=seed), 4, (0, 7))


def _without(seed: int, cut: SparseProbs, spec: SequenceSpec) -> tuple[int, ...]:
    return draw_without_replacement(cut, replace(spec, seed=seed), 4, 2)


def test_draws_follow_their_laws() -> None:
    """Pairs of draws over 4,000 seeds. Each law is the other's negative control."""
    ids = np.array([3, 900, 5_000])
    cut = SparseProbs(ids, np.array([0.5, 0.3, 0.2], dtype=np.float32))
    spec = SequenceSpec(SAMPLING, seed=0, prompt_length=1)
    probs = cut.exact().probs_M
    pairs = [(i, j) for i in range(3) for j in range(3) if i != j]
    both = np.outer(probs, probs).ravel()
    ordered = np.array([probs[i] * probs[j] / (1 - probs[i]) for i, j in pairs])
    for draws, fits_independent in ((_independent, True), (_without, False)):
        found = [np.searchsorted(ids, draws(seed, cut, spec)) for seed in range(4_000)]
        counts = np.bincount([3 * i + j for i, j in found], minlength=9)
        assert follows(counts, both) is fits_independent
        off_diagonal = counts[[3 * i + j for i, j in pairs]]
        assert follows(off_diagonal, ordered) is not fits_independent


def test_uniforms_are_those_of_the_document() -> None:
    """Token id 0's v at (position, purpose + 256 candidate), for many pairs at once."""
    positions, candidates = np.array([5, 5, 70_000]), np.array([0, 9, 1 << 16])
    found = uniforms_N(positions, candidates, seed=2**63 + 1, purpose=Purpose.ACCEPTANCE)
    for position, candidate, uniform in zip(positions, candidates, found, strict=True):
        counter = np.array([[0, position, 1 + 256 * candidate, 0]])
        word = int(philox_4x32(counter, (1, 2**31))[0, 0])
        assert uniform == (word + 0.5) / 2**32

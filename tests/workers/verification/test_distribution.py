"""The logits pipeline: like transformers' warpers for each parameter, and exact at its edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from paceline.errors import InternalError
from paceline.options import MAX_LOGIT_BIAS, MAX_REPETITION_PENALTY
from paceline.sampling import SamplingParams, SequenceSpec
from workers.verification.distribution import adjusted_logits, distribution_of
from workers.verification.prefix import Prefix

VOCAB_SIZE = 1500


def _logits(seed: int, scale: float) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(VOCAB_SIZE) * scale).astype(np.float32)


def _warpers(sampling: SamplingParams) -> list[LogitsProcessor]:
    """transformers' warpers in the order in which its generate applies them."""
    warpers: list[LogitsProcessor] = []
    if sampling.temperature != 1:
        warpers.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return warpers


@pytest.mark.parametrize("scale", [0.3, 2.0, 6.0])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.3),
        SamplingParams(temperature=1.7),
        SamplingParams(top_k=1),
        SamplingParams(top_k=50),
        SamplingParams(top_k=VOCAB_SIZE + 1),
        SamplingParams(top_p=0.05),
        SamplingParams(top_p=0.9),
        SamplingParams(top_p=0.999),
        SamplingParams(min_p=0.001),
        SamplingParams(min_p=0.1),
        SamplingParams(min_p=1.0),
        SamplingParams(temperature=0.7, top_k=40, top_p=0.8, min_p=0.05),
    ],
)
def test_equals_the_warpers_of_transformers(sampling: SamplingParams, scale: float) -> None:
    """The same tokens are kept, with the same probabilities."""
    for seed in range(5):
        logits_V = _logits(seed, scale)
        scores = torch.from_numpy(logits_V)[None]
        for warper in _warpers(sampling):
            scores = warper(None, scores)
        expected_V = scores[0].double().softmax(-1).numpy()

        kept = distribution_of(logits_V, sampling)
        ids = np.arange(VOCAB_SIZE) if kept.token_ids is None else kept.token_ids
        assert np.array_equal(ids, np.flatnonzero(expected_V))
        weights = np.exp(kept.log_weights.astype(np.float64))
        # A scaled logit is at most 200 here, so two float32 roundings are at most 200 * 2^-23.
        np.testing.assert_allclose(weights / weights.sum(), expected_V[ids], rtol=5e-5)


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3])
def test_repetition_penalty_equals_that_of_transformers(penalty: float) -> None:
    """Bit for bit, with repeated tokens, over prompt and output."""
    logits_V = _logits(1, 3.0)
    prefix = [5, 7, 5, 5, 900, 7, 1499]
    spec = SequenceSpec(SamplingParams(repetition_penalty=penalty), seed=0, prompt_length=4)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([prefix]), torch.from_numpy(logits_V)[None]
    )
    adjusted_V = adjusted_logits(logits_V, spec, Prefix.of(prefix, prompt_length=4))
    assert np.array_equal(adjusted_V, expected[0].numpy())


def _adjusted(logits: list[float], spec: SequenceSpec, prefix: list[int]) -> list[float]:
    before_V = np.array(logits, dtype=np.float32)
    kept_V = before_V.copy()
    before = Prefix.of(prefix, prompt_length=spec.prompt_length)
    after_V = adjusted_logits(before_V, spec, before)
    assert np.array_equal(before_V, kept_V), "the caller's logits were changed"
    return [float(logit) for logit in after_V]


def test_presence_and_frequency_count_the_output_only() -> None:
    """Presence counts once, frequency each time. Token 0 is only in the prompt."""
    sampling = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    spec = SequenceSpec(sampling, seed=0, prompt_length=2)
    assert _adjusted([1, 1, 1, 1], spec, [0, 1, 1, 2, 1]) == [1, 0, 0.25, 1]


def test_order_is_bias_then_repetition_then_presence_then_minimum() -> None:
    """The bias makes the logit positive, so the penalty divides. The end token stays masked."""
    sampling = SamplingParams(
        logit_bias={0: 3.0, 2: 50.0}, repetition_penalty=2.0, presence_penalty=0.5, min_tokens=2
    )
    spec = SequenceSpec(sampling, seed=0, prompt_length=0, end_token_ids=(2,))
    assert _adjusted([-1, -1, 0], spec, [0]) == [0.5, -1, -math.inf]


@pytest.mark.parametrize(("num_output", "masked"), [(0, True), (2, True), (3, False)])
def test_end_tokens_are_masked_below_min_tokens(num_output: int, masked: bool) -> None:
    """They are masked until the output has min_tokens, without the prompt. Strange end ids do no
    harm.
    """
    spec = SequenceSpec(
        SamplingParams(min_tokens=3), seed=0, prompt_length=4, end_token_ids=(1, 3, 99)
    )
    end = -math.inf if masked else 1.0
    assert _adjusted([1, 1, 1, 1], spec, [0] * (4 + num_output)) == [1, end, 1, end]


@pytest.mark.parametrize(
    ("prefix", "masked"),
    [([2, 1], {0}), ([1, 2, 1], {0, 3}), ([2, 1, 2], {0}), ([0, 1, 2, 1, 2], {0, 1})],
)
def test_the_last_token_of_a_bad_word_is_masked(prefix: list[int], masked: set[int]) -> None:
    """The first token is the prompt, in which no word begins. What is biased is masked too."""
    words = ((0,), (2, 1, 3), (1, 2, 1, 2, 1), (2, 1, 2, 1), (9,))
    spec = SequenceSpec(SamplingParams(logit_bias={0: 9.0}), 0, prompt_length=1, bad_words=words)
    row = _adjusted([1, 1, 1, 1], spec, prefix)
    assert {token_id for token_id in range(4) if row[token_id] == -math.inf} == masked


def test_huge_biases_and_penalties_stay_finite() -> None:
    """Values beyond float32 are capped, so they win instead of breaking the softmax."""
    spec = SequenceSpec(SamplingParams(logit_bias={1: 1e300, 2: -1e300}), seed=0, prompt_length=0)
    adjusted_V = np.array(_adjusted([1, 1, 1, -math.inf], spec, []), dtype=np.float32)
    assert adjusted_V[1] == np.finfo(np.float32).max
    kept = distribution_of(adjusted_V, SamplingParams(temperature=1e-300))
    assert kept.log_weights.tolist() == [-math.inf, 0, -math.inf, -math.inf]


def test_whatever_passes_the_checks_leaves_tokens_that_can_be_chosen() -> None:
    """All parameters at their limits, for every token, with the largest logits of any model."""
    tokens = range(4)
    for sign in (-1, 1):
        sampling = SamplingParams(
            logit_bias=dict.fromkeys(tokens, sign * MAX_LOGIT_BIAS),
            repetition_penalty=MAX_REPETITION_PENALTY,
            presence_penalty=2.0,
            frequency_penalty=2.0,
        )
        sampling.validate(len(tokens))
        spec = SequenceSpec(sampling, seed=0, prompt_length=0)
        adjusted = _adjusted([sign * 1e30] * 4, spec, [*tokens] * 1000)
        assert np.isfinite(np.array(adjusted, dtype=np.float32)).all()


@pytest.mark.parametrize("temperature", [1e-40, 1e-3, 1.0, 1e30])
def test_the_likeliest_weighs_one_at_any_temperature(temperature: float) -> None:
    """No overflow and no NaN for any distance between logits."""
    logits_V = np.array([1e4, -1e4, 3e38, -3e38, -np.inf], dtype=np.float32)
    kept = distribution_of(logits_V, SamplingParams(temperature=temperature))
    assert kept.log_weights[2] == 0
    assert kept.log_weights.max() == 0
    assert kept.log_weights[4] == -math.inf


@pytest.mark.parametrize(
    ("logits", "said"),
    [
        ([0, math.nan, 1], "got nan for token 1"),
        ([0, 1, math.inf], "got inf for token 2"),
        ([-math.inf] * 3, "3 masked tokens"),
    ],
)
def test_logits_without_a_likeliest_are_an_error(logits: list[float], said: str) -> None:
    """The error names the cause; no token is chosen silently."""
    with pytest.raises(InternalError, match=said):
        distribution_of(np.array(logits, dtype=np.float32), SamplingParams())


# Few values, so that ties are common; spread so far that every reach is used.
_logit = st.sampled_from([0.0, -0.5, -2.0, -2.5, -5.0, -8.0, -12.0, -20.0, -50.0, -math.inf])


@settings(max_examples=300, deadline=None)
@given(logits=st.lists(_logit, min_size=1, max_size=60), top_p=st.floats(0.001, 0.9999))
def test_top_p_equals_a_sort_of_the_whole_vocabulary(logits: list[float], top_p: float) -> None:
    """The partial selection keeps exactly what a full sort by (weight, lowest id) keeps."""
    logits_V = np.array([*logits, 0.0], dtype=np.float32)
    weights_V = np.exp(logits_V)
    order = np.argsort(-weights_V, kind="stable")
    sums = np.cumsum(weights_V[order], dtype=np.float64)
    wanted = top_p * float(weights_V.sum(dtype=np.float64))
    expected = np.sort(order[: int(np.searchsorted(sums, wanted)) + 1])
    kept = distribution_of(logits_V, SamplingParams(top_p=top_p))
    assert kept.token_ids is not None
    assert np.array_equal(kept.token_ids, expected)


@settings(max_examples=300, deadline=None)
@given(logits=st.lists(_logit, min_size=1, max_size=60), top_k=st.integers(1, 70))
def test_top_k_keeps_the_k_largest_and_their_ties(logits: list[float], top_k: int) -> None:
    """The result is that of a full sort, in ascending ids."""
    logits_V = np.array([*logits, 0.0], dtype=np.float32)
    kth = np.sort(logits_V)[::-1][min(top_k, logits_V.size) - 1]
    kept = distribution_of(logits_V, SamplingParams(top_k=top_k))
    ids = np.arange(logits_V.size) if kept.token_ids is None else kept.token_ids
    assert np.array_equal(ids, np.flatnonzero(logits_V >= kth))

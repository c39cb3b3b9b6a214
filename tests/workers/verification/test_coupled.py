"""The coupled rule: whatever is proposed, the text is that of plain decoding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import InternalError
from paceline.sampling import SamplingParams, SequenceSpec
from tests.workers.verification import naive
from tests.workers.verification.chi_square import follows
from tests.workers.verification.naive import verify_chain
from tests.workers.verification.table_model import SAMPLINGS, TableModel, plain, spec_of
from workers.verification.choice import choose_token
from workers.verification.verify import Verdict

Verifier = Callable[[torch.Tensor, Sequence[int], SequenceSpec, Sequence[int]], Verdict]


def _wrong_chains(verify: Verifier, name: str, num_seeds: int) -> int:
    """The number of chains of up to 3 candidates of 3 tokens that lead away from plain decoding."""
    prompt = [2, 1]
    chains = [c for depth in range(4) for c in itertools.product(range(3), repeat=depth)]
    wrong = 0
    for seed in range(num_seeds):
        model, spec = TableModel(3, seed), spec_of(name, seed, len(prompt))
        text = plain(model, spec, prompt, len(prompt) + 4)[len(prompt) :]
        for chain in chains:
            verdict = verify(model.logits_TV(prompt, chain), chain, spec, prompt)
            committed = [*chain[: verdict.num_accepted], verdict.token_id]
            agreeing = next((i for i, token in enumerate(chain) if token != text[i]), len(chain))
            wrong += committed != text[: agreeing + 1]
    return wrong


@pytest.mark.parametrize("name", SAMPLINGS)
def test_every_chain_leads_to_the_text_of_plain_decoding(name: str) -> None:
    """All 40 chains do, and each is accepted as far as it agrees."""
    assert _wrong_chains(verify_chain, name, num_seeds=100) == 0


def _forgets_the_window(
    logits_TV: torch.Tensor, candidates: Sequence[int], spec: SequenceSpec, prefix: Sequence[int]
) -> Verdict:
    """Broken: every row gets the noise and the penalties of the window's first position."""
    for index, candidate in enumerate(candidates):
        token_id = choose_token(logits_TV[index], spec, prefix)
        if token_id != candidate:
            return Verdict(index, token_id)
    return Verdict(len(candidates), choose_token(logits_TV[-1], spec, prefix))


def _trusts_the_drafter(
    logits_TV: torch.Tensor, candidates: Sequence[int], spec: SequenceSpec, prefix: Sequence[int]
) -> Verdict:
    """Broken: accepts everything."""
    token_id = choose_token(logits_TV[-1], spec, [*prefix, *candidates])
    return Verdict(len(candidates), token_id)


@pytest.mark.parametrize(
    ("broken", "name"),
    [
        (_forgets_the_window, "plain"),  # no penalties here: it is the noise that is wrong
        (_forgets_the_window, "greedy penalties"),  # no noise here: it is the penalties
        (_forgets_the_window, "minimum"),
        (_trusts_the_drafter, "greedy"),
    ],
)
def test_broken_verifiers_are_noticed(broken: Verifier, name: str) -> None:
    """Negative controls of the test above."""
    assert _wrong_chains(broken, name, num_seeds=10) > 0


def test_any_window_split_gives_the_same_text() -> None:
    """2,000 seeds with good and bad drafts in windows of changing length, step by step."""
    rng = np.random.default_rng(3)
    names = list(SAMPLINGS)
    num_accepted = num_refused = 0
    for seed in range(2_000):
        prompt = rng.integers(0, 5, rng.integers(1, 4)).tolist()
        model = TableModel(5, seed % 50)
        spec = spec_of(names[seed % len(names)], seed * 2**50 + seed, len(prompt))
        spec = replace(spec, sample_index=seed % 3)
        length = len(prompt) + 7
        text = plain(model, spec, prompt, length + 4)
        tokens = list(prompt)
        while len(tokens) < length:
            chain = text[len(tokens) : len(tokens) + rng.integers(0, 5)]
            chain = [int(rng.integers(5)) if rng.random() < 0.2 else token for token in chain]
            verdict = verify_chain(model.logits_TV(tokens, chain), chain, spec, tokens)
            tokens += [*chain[: verdict.num_accepted], verdict.token_id]
            num_accepted += verdict.num_accepted
            num_refused += verdict.num_accepted < len(chain)
        assert tokens == text[: len(tokens)], f"seed {seed}"
    assert num_accepted > 1_000
    assert num_refused > 500


def test_choices_follow_the_exact_law() -> None:
    """Over 8,000 seeds. As a negative control, another temperature is noticed."""
    logits = [1.0, 0.2, -0.5, 2.0, 0.9, -3.0]
    sampling = SamplingParams(temperature=0.8, top_k=5, top_p=0.97)
    spec = SequenceSpec(sampling, seed=0, prompt_length=1)
    logits_V = torch.tensor(logits)
    draws = [choose_token(logits_V, replace(spec, seed=seed), [3]) for seed in range(8_000)]
    counts = np.bincount(draws, minlength=6)

    def fits(tested: SamplingParams) -> bool:
        probs = naive.probabilities(logits, replace(spec, sampling=tested))
        ids = list(probs)
        assert counts[ids].sum() == counts.sum(), "a token that was cut was drawn"
        return follows(counts[ids], np.array([probs[i] for i in ids]))

    assert fits(sampling)
    assert not fits(replace(sampling, temperature=0.9))


_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 7]),
    top_p=st.sampled_from([1e-6, 0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.2, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.01, 1.2]),
    presence_penalty=st.sampled_from([0.0, 2.0]),
    frequency_penalty=st.sampled_from([0.0, -2.0]),
)
_logit = st.one_of(
    st.floats(-10, 10, width=32), st.sampled_from([1e4, -1e4, 0.0, -0.0, 3e38, -math.inf])
)


@settings(max_examples=400, deadline=None)
@given(
    rows=st.integers(1, 40).flatmap(
        lambda v: st.lists(st.lists(_logit, min_size=v, max_size=v), min_size=1, max_size=4)
    ),
    sampling=_params,
    seed=st.integers(0, 2**64 - 1),
    offset=st.integers(0, 5),
)
def test_a_row_decides_alone_and_never_for_a_masked_token(
    rows: list[list[float]], sampling: SamplingParams, seed: int, offset: int
) -> None:
    """choose_token on each row gives what verify_chain gives, whatever rows come with it."""
    vocab_size = len(rows[0])
    for row in rows:
        row[seed % vocab_size] = 1.5  # at least one token is not masked
    logits_TV = torch.tensor(rows)
    before_TV = logits_TV.clone()
    prefix = [token % vocab_size for token in range(offset)]
    spec = SequenceSpec(sampling, seed=seed, prompt_length=offset // 2)

    chosen: list[int] = []
    for logits_V in logits_TV:
        chosen.append(choose_token(logits_V.clone(), spec, [*prefix, *chosen]))
        assert logits_V[chosen[-1]] > -math.inf
    for window in range(len(rows)):
        verdict = verify_chain(logits_TV[: window + 1], chosen[:window], spec, prefix)
        assert verdict == Verdict(window, chosen[window])
        refused = [*chosen[:window], chosen[window] + 1, *chosen[window + 1 :]][: len(rows) - 1]
        if len(refused) > window and refused[window] < vocab_size:
            assert verify_chain(logits_TV, refused, spec, prefix) == verdict
    assert torch.equal(logits_TV, before_TV)


@pytest.mark.parametrize("scale", [0.5, 3.0, 9.0])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_large_vocabularies_take_the_same_choices(name: str, scale: float) -> None:
    """Scores are computed only for some tokens, and equal the naive rule with all of them."""
    rng = np.random.default_rng(5)
    for position in range(4):
        spec = replace(spec_of(name, 9, 2), sample_index=position)
        prefix = rng.integers(0, 5003, 2 + position).tolist()
        logits_TV = torch.from_numpy((rng.standard_normal((2, 5003)) * scale).astype(np.float32))
        first = naive.choose(logits_TV[0].tolist(), spec, prefix)
        second = naive.choose(logits_TV[1].tolist(), spec, [*prefix, first])
        assert choose_token(logits_TV[0], spec, prefix) == first
        assert verify_chain(logits_TV, [first], spec, prefix) == Verdict(1, second)


def test_the_lowest_id_wins_a_tie() -> None:
    """Greedy decoding, also if a bias makes the tie."""
    spec = SequenceSpec(SamplingParams(temperature=0.0), seed=0, prompt_length=0)
    assert choose_token(torch.tensor([0.0, 2.0, 1.0, 2.0]), spec, [0]) == 1
    biased = replace(spec, sampling=SamplingParams(temperature=0.0, logit_bias={0: 2.0}))
    assert choose_token(torch.tensor([0.0, 2.0, 1.0, 2.0]), biased, [0]) == 0


def test_rows_after_a_mismatch_are_not_looked_at() -> None:
    """NaN there harms nothing. In a row that decides, it is an error."""
    spec = SequenceSpec(SamplingParams(temperature=0.0), seed=0, prompt_length=0)
    logits_TV = torch.tensor([[0.0, 1.0], [math.nan, 0.0]])
    assert verify_chain(logits_TV, [0], spec, [0]) == Verdict(0, 1)
    for sampling in (spec.sampling, SamplingParams(), SamplingParams(logit_bias={1: 1.0})):
        with pytest.raises(InternalError, match="got nan for token 0"):
            verify_chain(logits_TV[1:], [], replace(spec, sampling=sampling), [0])


def test_a_request_that_masks_everything_is_an_error() -> None:
    """min_tokens over a vocabulary that has only end tokens."""
    spec = SequenceSpec(SamplingParams(min_tokens=1), seed=0, prompt_length=1, end_token_ids=(0, 1))
    with pytest.raises(InternalError, match="2 masked tokens"):
        choose_token(torch.zeros(2), spec, [0])


@pytest.mark.parametrize(
    ("logits_TV", "candidates", "said"),
    [
        (torch.zeros(2, 3), [0, 1], "expected 3 rows of logits for 2 candidates, got 2"),
        (torch.zeros(1, 3, dtype=torch.bfloat16), [], "expected float32 logits"),
        (torch.zeros(1, 0), [], "expected float32 logits"),
        (torch.zeros(2, 3), [3], "expected token ids below 3, got 3"),
    ],
)
def test_wrong_shapes_and_ids_are_named(
    logits_TV: torch.Tensor, candidates: list[int], said: str
) -> None:
    """Else the text would be wrong."""
    spec = SequenceSpec(SamplingParams(repetition_penalty=1.1), seed=0, prompt_length=0)
    with pytest.raises(InternalError, match=said):
        verify_chain(logits_TV, candidates, spec, [1])

"""Every rule as it runs: drafts and coins from the keyed noise, logits from a model."""

from __future__ import annotations

import itertools
import math
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
from tests.workers.verification.drafters import DRAFTERS, pretends_to_be_uniform
from tests.workers.verification.table_model import SAMPLINGS, TableModel, plain, spec_of
from workers.verification import choice
from workers.verification.candidates import (
    CandidateTree,
    DraftProbs,
    SparseProbs,
    check_proposal,
    merge_paths,
)
from workers.verification.choice import choose_token
from workers.verification.rule import RULES, rule_named
from workers.verification.verify import Verdict, Window, verify, verify_batch

PROMPT = [1]
TARGET, DRAFTER = TableModel(3, 11), TableModel(3, 12)
SAMPLING = SamplingParams(temperature=1.2, repetition_penalty=1.3)


def _decode(rule: str, spec: SequenceSpec, length: int, *, lies: bool = False) -> list[int]:
    """Decode windows, one after another, until `length` tokens are committed."""
    tokens = list(PROMPT)
    while len(tokens) < len(PROMPT) + length:
        drafted = DRAFTERS[rule](DRAFTER, spec, tokens)
        tree, draft_probs = pretends_to_be_uniform(drafted) if lies else drafted
        check_proposal(rule, tree, draft_probs, vocab_size=3, max_nodes=6)
        verdict = verify(rule, TARGET.logits_RV(tokens, tree), tree, spec, tokens, draft_probs)
        tokens += [*tree.tokens_of(verdict.accepted), verdict.token_id]
    return tokens[len(PROMPT) : len(PROMPT) + length]


def _target_law(spec: SequenceSpec, length: int) -> list[float]:
    law = []
    for text in itertools.product(range(3), repeat=length):
        tokens, prob = list(PROMPT), 1.0
        for token_id in text:
            row = naive.adjusted(TARGET.logits_V(tokens).tolist(), spec, tokens)
            prob *= naive.probabilities(row, spec).get(token_id, 0.0)
            tokens.append(token_id)
        law.append(prob)
    return law


def _served(rule: str, num_seeds: int, *, lies: bool = False) -> bool:
    """Whether the first two tokens over `num_seeds` seeds follow the target's law: 9 cells."""
    spec = SequenceSpec(SAMPLING, seed=0, prompt_length=len(PROMPT))
    counts = np.zeros(9, dtype=np.int64)
    for seed in range(num_seeds):
        first, second = _decode(rule, replace(spec, seed=seed * 2**40 + seed), 2, lies=lies)
        counts[3 * first + second] += 1
    return follows(counts, np.array(_target_law(spec, 2)))


@pytest.mark.parametrize("rule", list(RULES))
def test_the_keyed_rules_serve_the_law(rule: str) -> None:
    """1,500 seeds; wrongly False once in a million."""
    assert _served(rule, 1_500)


@pytest.mark.parametrize("rule", ["rejection", "kseq", "recursive", "mcsd"])
def test_probabilities_that_were_not_drawn_from_are_noticed(rule: str) -> None:
    """Negative control of the test above, with the same number of seeds."""
    assert not _served(rule, 1_500, lies=True)


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("name", ["greedy", "greedy penalties"])
def test_at_temperature_0_every_rule_gives_the_text_of_plain_decoding(rule: str, name: str) -> None:
    for seed in range(10):
        spec = spec_of(name, seed, len(PROMPT))
        expected = plain(TARGET, spec, PROMPT, 9)[len(PROMPT) :]
        assert _decode(rule, spec, 8) == expected


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "coupled"])
def test_nothing_is_tossed_anew(rule: str) -> None:
    """A repeated call gives the same verdict. Another seed or sample index may give another."""
    spec = SequenceSpec(SAMPLING, seed=3, prompt_length=1)
    verdicts: set[tuple[Verdict, tuple[int, ...]]] = set()
    for sample_index in range(40):
        one = replace(spec, sample_index=sample_index)
        tree, probs = DRAFTERS[rule](DRAFTER, one, PROMPT)
        logits_RV = TARGET.logits_RV(PROMPT, tree)
        verdict = verify(rule, logits_RV, tree, one, PROMPT, probs)
        assert verify(rule, logits_RV, tree, one, PROMPT, probs) == verdict
        verdicts.add((verdict, tree.token_ids))
    assert len(verdicts) > 3


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("name", SAMPLINGS)
def test_without_candidates_every_rule_is_plain_decoding(rule: str, name: str) -> None:
    spec = spec_of(name, 77, 1)
    none = CandidateTree((), ())
    for last in range(3):
        verdict = verify(rule, TARGET.logits_RV([last], none), none, spec, [last])
        assert verdict == Verdict(0, choose_token(TARGET.logits_V([last]), spec, [last]))


def test_rules_that_need_probabilities_say_so() -> None:
    spec = SequenceSpec(SAMPLING, seed=3, prompt_length=1)
    chain = CandidateTree.chain([1])
    with pytest.raises(InternalError, match="under node 0 for the rule 'kseq'"):
        verify("kseq", TARGET.logits_RV(PROMPT, chain), chain, spec, PROMPT)


_logit = st.one_of(
    st.floats(-10, 10, width=32), st.sampled_from([1e4, -1e4, 0.0, 3e38, -3e38, -math.inf])
)


@pytest.mark.parametrize("rule", list(RULES))
@settings(max_examples=60, deadline=None)
@given(drawn=st.data())
def test_any_shape_and_any_logits(rule: str, drawn: st.DataObject) -> None:
    """A verdict is a path of the tree and an unmasked token. The logits do not change."""
    window = _any_window(drawn, rule)
    logits_RV = torch.as_tensor(window.logits_RV)
    before_RV = logits_RV.clone()
    _check_verdict(window, _alone(window))
    assert torch.equal(logits_RV, before_RV)


@settings(max_examples=100, deadline=None)
@given(drawn=st.data())
def test_a_batch_gives_each_window_what_it_gives_alone(drawn: st.DataObject) -> None:
    """For any rules, vocabularies, samplings and trees, and any number of rows in a call."""
    rules = drawn.draw(st.lists(st.sampled_from(list(RULES)), max_size=5))
    windows = [_any_window(drawn, rule) for rule in rules]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "_LOGITS_AT_ONCE", drawn.draw(st.integers(1, 60)))
        verdicts = verify_batch(windows)
    assert verdicts == [_alone(window) for window in windows]


def test_a_batch_of_large_vocabularies_gives_each_window_what_it_gives_alone() -> None:
    """Noise is computed for several rows at once, and scores for few tokens."""
    rng = np.random.default_rng(3)
    windows = []
    for seed in range(9):
        logits_RV = torch.from_numpy(rng.standard_normal((4, 12_003)).astype(np.float32))
        spec = spec_of(list(SAMPLINGS)[seed % len(SAMPLINGS)], seed, 1)
        chain: list[int] = []
        for row_V in logits_RV[:3]:
            chain.append(choose_token(row_V, spec, [5, *chain]))
        tree = CandidateTree.chain(chain)
        windows.append(Window("coupled", logits_RV, tree, spec, [5]))
    verdicts = verify_batch(windows)
    assert verdicts == [_alone(window) for window in windows]
    assert all(verdict.num_accepted == 3 for verdict in verdicts)


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_another_dtype_are_refused(rule: str, dtype: torch.dtype) -> None:
    spec = SequenceSpec(SAMPLING, seed=3, prompt_length=1)
    with pytest.raises(InternalError, match="expected float32 logits"):
        verify(rule, torch.zeros(1, 3, dtype=dtype), CandidateTree((), ()), spec, PROMPT)


def _alone(window: Window) -> Verdict:
    return verify(
        window.rule, window.logits_RV, window.tree, window.spec, window.prefix, window.draft_probs
    )


def _check_verdict(window: Window, verdict: Verdict) -> None:
    node = 0
    for index in verdict.accepted:
        assert window.tree.parents[index] == node
        assert window.logits_RV[node, window.tree.token_ids[index]] > -math.inf
        node = index + 1
    assert window.logits_RV[node, verdict.token_id] > -math.inf


def _any_window(drawn: st.DataObject, rule: str) -> Window:
    """Candidates of any shape over 1 to 12 tokens, with any logits that do not mask every token."""
    vocab_size = drawn.draw(st.integers(1, 12))
    spec = SequenceSpec(
        drawn.draw(st.sampled_from(list(SAMPLINGS.values()))),
        seed=drawn.draw(st.integers(0, 2**64 - 1)),
        prompt_length=1,
    )
    spec = replace(spec, sampling=replace(spec.sampling, logit_bias={}))
    tree = _any_tree(drawn, rule, vocab_size)
    rows = st.lists(_logit, min_size=vocab_size, max_size=vocab_size)
    rows_RV = [drawn.draw(rows) for _ in range(len(tree) + 1)]
    for row in rows_RV:
        row[drawn.draw(st.integers(0, vocab_size - 1))] = 1.0  # not all are masked
    uniform = SparseProbs(
        np.arange(vocab_size), np.full(vocab_size, 1 / vocab_size, dtype=np.float32)
    )
    probs = DraftProbs({n: uniform for n in range(len(tree) + 1) if tree.children(n)})
    check_proposal(rule, tree, probs, vocab_size=vocab_size, max_nodes=6)
    return Window(rule, torch.tensor(rows_RV), tree, spec, [0], probs)


def _any_tree(drawn: st.DataObject, rule: str, vocab_size: int) -> CandidateTree:
    token = st.integers(0, vocab_size - 1)
    if rule == "kseq":
        return merge_paths(drawn.draw(st.lists(st.lists(token, max_size=2), max_size=3)))
    token_ids: list[int] = []
    parents: list[int] = []
    for token_id in drawn.draw(st.lists(token, max_size=6)):
        size = len(token_ids)
        parent = size if rule_named(rule).chain_only else drawn.draw(st.integers(0, size))
        twin = (parent, token_id) in zip(parents, token_ids, strict=True)
        if not twin or rule_named(rule).equal_siblings:
            token_ids.append(token_id)
            parents.append(parent)
    return CandidateTree(tuple(token_ids), tuple(parents))

"""Stopping rules: the published updates by hand, and what the cost rule learns."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.options import Stopping
from workers.drafting.draft_stopping import (
    AcceptanceMap,
    AdaEdl,
    Confidence,
    CostAware,
    DrafterStopping,
    Stopper,
    TokenSignal,
    signal_of,
)
from workers.drafting.tree import Grant, Kept

SURE = TokenSignal(entropy=0.02, margin=0.98, draft_prob=0.99)
UNSURE = TokenSignal(entropy=3.0, margin=0.02, draft_prob=0.1)
FREE = 0.0


def test_fixed_is_no_rule() -> None:
    """Only the grant bounds a draft; nothing is asked of the distribution."""
    stopper = Stopper(Stopping.FIXED, DrafterStopping())
    assert not stopper.watches
    assert not stopper.stops_after([1, 2, 3], Grant(9, nodes=8), pass_ms=1.0)
    assert stopper.state() == {}


def test_adaedl_stops_by_entropy() -> None:
    """It stops if 1 - sqrt(0.2 H) < threshold: with threshold 0.4 from H = 1.8 on."""
    rule = AdaEdl(threshold=0.4)
    assert not rule.should_stop([TokenSignal(1.79, 0.1, 0.1)], FREE)
    assert rule.should_stop([TokenSignal(1.81, 0.1, 0.1)], FREE)
    assert not rule.should_stop([UNSURE, SURE], FREE), "the last token's distribution decides"


def test_adaedl_updates_as_published() -> None:
    """By hand: rate 0.9; then 0.5 * 0.9 + 0.5 * 1 = 0.95; and so on."""
    rule = AdaEdl(threshold=0.4)
    rule.learn([SURE] * 2, 2, longest=4)  # above the wanted rate, not the longest: 0.4 - 0.1 * 0.01
    assert rule.metrics() == pytest.approx({"threshold": 0.399, "acceptance_rate": 0.95})
    rule.learn([SURE] * 4, 4, longest=4)  # the longest: as it was
    assert rule.metrics() == pytest.approx({"threshold": 0.399, "acceptance_rate": 0.975})
    rule.learn([SURE] * 4, 0, longest=4)  # below: up
    assert rule.metrics() == pytest.approx({"threshold": 0.4, "acceptance_rate": 0.4875})


def test_confidence_is_the_product() -> None:
    """0.7 * 0.5 = 0.35 continues at threshold 0.3; times 0.8 it is 0.28 and stops."""
    rule = Confidence(threshold=0.3)
    drafted = [TokenSignal(1, 0.1, prob) for prob in (0.7, 0.5, 0.8)]
    assert not rule.should_stop(drafted[:2], FREE)
    assert rule.metrics()["confidence"] == pytest.approx(0.35)
    assert rule.should_stop(drafted, FREE)
    assert rule.metrics()["confidence"] == pytest.approx(0.28)


def test_cost_goes_on_while_the_gain_is_worth_its_price() -> None:
    """Free tokens are always worth it; an expensive one only after sure ones."""
    rule = CostAware(AcceptanceMap())
    assert not rule.should_stop([UNSURE] * 7, FREE)
    dear = 0.1 * (4.0 + 0.5)
    assert not rule.should_stop([SURE], dear)
    assert rule.should_stop([SURE, UNSURE], dear)
    assert rule.metrics()["price"] == pytest.approx(0.45)
    assert rule.metrics()["gain"] < 0.45


def test_the_map_learns_what_is_accepted() -> None:
    """2,000 verdicts accept 90 % of sure tokens and 20 % of unsure ones; it follows a swap too."""
    rng = np.random.default_rng(4)
    acceptance = AcceptanceMap()
    rule = CostAware(acceptance)
    for sure_rate, unsure_rate in ((0.9, 0.2), (0.3, 0.8)):
        for _ in range(2_000):
            for signal, rate in ((SURE, sure_rate), (UNSURE, unsure_rate)):
                rule.learn([signal], int(rng.random() < rate), longest=8)
        # Some 200 observations have not faded: a standard deviation of 0.03.
        assert acceptance.estimate(SURE) == pytest.approx(sure_rate, abs=0.12)
        assert acceptance.estimate(UNSURE) == pytest.approx(unsure_rate, abs=0.12)
        assert acceptance.mean == pytest.approx((sure_rate + unsure_rate) / 2, abs=0.15)


def test_tokens_after_the_first_refusal_teach_nothing() -> None:
    """They were not tested."""
    acceptance, short = AcceptanceMap(), AcceptanceMap()
    CostAware(acceptance).learn([UNSURE, UNSURE, SURE, SURE], 1, longest=8)
    CostAware(short).learn([UNSURE, UNSURE], 1, longest=8)
    assert acceptance.estimate(SURE) == short.estimate(SURE)
    assert acceptance.num_observed == pytest.approx(1.995)


def test_what_is_seen_of_some_tokens_says_something_of_the_others() -> None:
    """A pair that agrees where the bound expects refusals agrees elsewhere too."""
    estimates = []
    for accepted in (True, False):
        acceptance = AcceptanceMap()
        estimates.append(acceptance.estimate(UNSURE))
        for _ in range(20):
            acceptance.observe(TokenSignal(1.8, 0.3, 0.4), accepted=accepted)
        estimates.append(acceptance.estimate(UNSURE))
    at_first, agreed, again, refused = estimates
    assert at_first == again
    assert agreed > 1 - (1 - at_first) / 4
    assert 0 < refused < at_first


def test_a_round_begins_with_an_outcome() -> None:
    """Kept run-ahead never stops a draft by its entropy. By cost it may."""
    for stopping, stops in ((Stopping.ADAEDL, False), (Stopping.COST, True)):
        stopper = Stopper(stopping, DrafterStopping())
        for node in (1, 2):
            stopper.note(node, UNSURE)
        grant = Grant(9, nodes=8, tokens_per_ms=1.0, step_ms_per_candidate=1.0)
        assert stopper.stops_after([1, 2], grant, pass_ms=1.0)
        stopper.committed(Kept((5,), (1,), (2,), agreed=True), [], longest=8)
        assert stopper.stops_after([1], grant, pass_ms=1.0) is stops
        stopper.note(2, UNSURE)
        assert stopper.stops_after([1, 2], grant, pass_ms=1.0)


def test_blind_rules_leave_no_drafter_idle() -> None:
    """While drafting is free, only the cost rule stops, by what candidates add to a step."""
    for stopping, stops in (
        (Stopping.ADAEDL, False),
        (Stopping.CONFIDENCE, False),
        (Stopping.COST, True),
    ):
        stopper = Stopper(stopping, DrafterStopping())
        stopper.note(1, UNSURE)
        waited_for = Grant(9, nodes=8, tokens_per_ms=1.0, step_ms_per_candidate=1.0)
        assert stopper.stops_after([1], waited_for, pass_ms=1.0)
        free = replace(waited_for, drafting_is_free=True)
        assert stopper.stops_after([1], free, pass_ms=1.0) is stops
        assert stopper.state()


def test_what_was_learned_outlives_a_sequence() -> None:
    """Five drafts of one sequence move the threshold of the next one, but not another drafter's."""
    shared = DrafterStopping()
    first = Stopper(Stopping.ADAEDL, shared)
    for _ in range(5):
        first.note(1, SURE)
        first.committed(Kept((5,), (1,), (), agreed=True), [], longest=8)
    assert Stopper(Stopping.ADAEDL, shared).state()["threshold"] == pytest.approx(0.395)
    assert Stopper(Stopping.ADAEDL, DrafterStopping()).state()["threshold"] == 0.4


_logit = st.one_of(st.floats(-20, 20, width=32), st.sampled_from([1e4, -1e4, 3e38, -math.inf]))


@settings(max_examples=200, deadline=None)
@given(logits=st.lists(_logit, min_size=1, max_size=30), at=st.integers(0, 29))
def test_signals_are_those_of_the_softmax(logits: list[float], at: int) -> None:
    """For any logits, there is no NaN and no rule fails."""
    logits_V = np.array([*logits, 0.0], dtype=np.float32)
    token_id = at % logits_V.size
    signal = signal_of(logits_V, token_id)
    exact_V = np.exp(logits_V.astype(np.float64) - float(logits_V.max()))
    exact_V /= exact_V.sum()
    positive_V = exact_V[exact_V > 0]
    assert signal.entropy == pytest.approx(-(positive_V * np.log(positive_V)).sum(), abs=1e-4)
    assert signal.draft_prob == pytest.approx(exact_V[token_id], abs=1e-5)
    first, second = np.sort(exact_V)[::-1][:2]
    assert signal.margin == pytest.approx(first - second, abs=1e-5)
    for name in set(Stopping) - {Stopping.FIXED}:
        rule = DrafterStopping().rule(name)
        assert rule is not None
        rule.should_stop([signal], FREE)
        rule.learn([signal] * 4, 2, longest=4)
        assert all(math.isfinite(value) for value in rule.metrics().values())

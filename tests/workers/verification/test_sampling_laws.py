"""With filters, bias and penalties every rule commits the target's law: exactly, by enumeration.

Penalties and min_tokens look at the tokens before a position, inside a window at those of each
candidate's own path. The law that is asked for is that of plain decoding with the same parameters.
(Under the coupled rule the text is that of plain decoding: test_coupled.py and test_trees.py.)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from paceline.sampling import SamplingParams
from tests.workers.verification import naive
from tests.workers.verification.enumeration import (
    Draft,
    Shape,
    drawn_chains,
    drawn_trees,
    is_exact,
    unordered_trees,
)
from tests.workers.verification.sampled_models import (
    PROMPT,
    SAMPLINGS,
    VOCAB_SIZE,
    SampledModels,
    verified_law,
)
from workers.verification import choice
from workers.verification.candidates import CandidateTree
from workers.verification.distribution import WindowRows, adjusted_logits, distribution_of

pytestmark = pytest.mark.long

LENGTH = 3
SPINE: Shape = (((), ()), ())  # two children, and two under the first of them
FIXED = (((0, 1), (0, 1)), ((2, 1, 0), (0, 0, 1)), ((1, 1, 2), (0, 1, 1)))

DRAFTS: dict[str, Callable[[SampledModels], Iterable[Draft]]] = {
    "rejection": lambda models: drawn_chains(models, 2),
    "kseq": lambda models: unordered_trees(models, 2, 2),
    "recursive": lambda models: drawn_trees(models, SPINE, with_replacement=False),
    "mcsd": lambda models: drawn_trees(models, SPINE, with_replacement=True),
    "one-hot": lambda models: [(CandidateTree(*one), 1 / len(FIXED)) for one in FIXED],
}


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("rule", DRAFTS)
def test_the_law_is_the_targets(rule: str, name: str) -> None:
    models = SampledModels(SAMPLINGS[name])
    assert is_exact(models, verified_law(models, rule, DRAFTS[rule](models), LENGTH))


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_law_asked_for_is_that_of_the_pipeline_in_plain_python(name: str) -> None:
    """After every text of up to 3 tokens; the difference is that of float32 and float64."""
    models = SampledModels(SAMPLINGS[name])
    for length in range(LENGTH + 1):
        for prefix in itertools.product(range(VOCAB_SIZE), repeat=length):
            tokens = [*PROMPT, *prefix]
            row = naive.adjusted(models.target.logits_V(tokens).tolist(), models.spec, tokens)
            expected = naive.probabilities(row, models.spec)
            found_V = models.target_V(prefix)
            for token_id in range(VOCAB_SIZE):
                assert found_V[token_id] == pytest.approx(expected.get(token_id, 0.0), abs=1e-6)


@pytest.mark.parametrize("rule", DRAFTS)
def test_a_drafter_may_sample_otherwise_if_it_says_so(rule: str) -> None:
    """One that knows nothing of the request's parameters is slower, and the law is the same."""
    models = SampledModels(SAMPLINGS["all"], draft_sampling=SamplingParams())
    assert is_exact(models, verified_law(models, rule, DRAFTS[rule](models), LENGTH))


# Negative controls: each is wrong by more than rounding.


def _by_the_committed_prefix(patch: pytest.MonkeyPatch) -> None:
    """Inside a window, penalties and min_tokens count the committed tokens only."""

    def adjusted_V(rows: Any, node: int, accepted: Any) -> Any:
        return adjusted_logits(rows._rows_RV[node], rows.spec, rows._prefix)

    patch.setattr(WindowRows, "adjusted_V", adjusted_V)


def _bonus_without_filters(patch: pytest.MonkeyPatch) -> None:
    """The token after an accepted window is drawn without top-k, top-p and min-p."""

    def unfiltered(adjusted_V: Any, sampling: SamplingParams) -> Any:
        return distribution_of(adjusted_V, SamplingParams(temperature=sampling.temperature))

    patch.setattr(choice, "distribution_of", unfiltered)


@pytest.mark.parametrize("rule", DRAFTS)
@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("repetition", _by_the_committed_prefix),
        ("frequency", _by_the_committed_prefix),
        ("min-tokens", _by_the_committed_prefix),
        ("top-k", _bonus_without_filters),
    ],
)
def test_what_is_broken_is_noticed(
    rule: str,
    name: str,
    broken: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = SampledModels(SAMPLINGS[name])
    models.law((), LENGTH)  # before anything is broken
    broken(monkeypatch)
    law = verified_law(models, rule, DRAFTS[rule](models), LENGTH)
    assert law.sum() == pytest.approx(1)
    assert np.abs(law - models.law((), LENGTH)).max() > 1e-4


@pytest.mark.parametrize("name", ["temperature", "top-k", "frequency"])
@pytest.mark.parametrize("rule", [rule for rule in DRAFTS if rule != "one-hot"])
def test_probabilities_from_before_the_pipeline_are_noticed(rule: str, name: str) -> None:
    """The drafter draws as the request asks, and sends what it had before the parameters."""
    models = SampledModels(SAMPLINGS[name])
    before = SampledModels(SAMPLINGS[name], draft_sampling=SamplingParams())
    drafts = DRAFTS[rule](models)
    law = verified_law(models, rule, drafts, LENGTH, told=before.draft_probs)
    assert law.sum() == pytest.approx(1)
    assert np.abs(law - models.law((), LENGTH)).max() > 1e-4

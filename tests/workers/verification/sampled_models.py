"""Models whose distributions come from logits by a request's sampling parameters, and their law.

What verification commits is summed over every fall of the coins, with production's `verify`: only
its random numbers are replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.sampling import SamplingParams, SequenceSpec
from tests.workers.verification.enumeration import Coins, Draft, Prefix, TinyModels
from tests.workers.verification.table_model import TableModel
from workers.verification import prefix as text_prefix
from workers.verification.candidates import CandidateTree, DraftProbs, SparseProbs
from workers.verification.choice import Draw
from workers.verification.distribution import adjusted_logits, probabilities_of
from workers.verification.draws import cut_draft_probs
from workers.verification.verify import verify

VOCAB_SIZE = 3
PROMPT = (1, 2)
END = 0

# Each does something at every prefix, or to some tokens; penalties and min_tokens by the prefix.
SAMPLINGS = {
    "temperature": SamplingParams(temperature=0.6),
    "top-k": SamplingParams(temperature=1.3, top_k=2),
    "top-p": SamplingParams(temperature=1.5, top_p=0.9),
    "min-p": SamplingParams(temperature=1.5, min_p=0.3),
    "bias": SamplingParams(temperature=0.7, logit_bias={1: 0.8, 2: -0.5}),
    "min-tokens": SamplingParams(temperature=1.2, min_tokens=2),
    "repetition": SamplingParams(temperature=0.9, repetition_penalty=1.8),
    "presence": SamplingParams(temperature=1.1, presence_penalty=0.9),
    "frequency": SamplingParams(temperature=1.1, frequency_penalty=-0.8),
    "all": SamplingParams(
        temperature=1.4,
        top_k=2,
        top_p=0.95,
        min_p=0.05,
        logit_bias={0: 0.3},
        min_tokens=1,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.5,
    ),
}


class SampledModels(TinyModels):
    """`target_V` and `draft` are what production's pipeline makes of each model's logits.

    `draft_sampling`: the drafter's parameters, where they are not the request's.
    """

    def __init__(
        self, sampling: SamplingParams, *, draft_sampling: SamplingParams | None = None
    ) -> None:
        super().__init__(VOCAB_SIZE, "random")
        self.spec = _spec_of(sampling)
        self._draft_spec = _spec_of(draft_sampling or sampling)
        # Of these two no sampling leaves a single token, or nothing on which they agree.
        self.target, self.drafter = TableModel(VOCAB_SIZE, 30), TableModel(VOCAB_SIZE, 230)

    def _at(self, prefix: Prefix) -> tuple[NDArray[np.float64], SparseProbs]:
        if prefix not in self._known:
            tokens = (*PROMPT, *prefix)
            before = text_prefix.Prefix.of(tokens, prompt_length=len(PROMPT))
            adjusted_V = adjusted_logits(self.target.logits_V(tokens).numpy(), self.spec, before)
            draft = cut_draft_probs(self.drafter.logits_V(tokens), self._draft_spec, tokens)
            self._known[prefix] = probabilities_of(adjusted_V, self.spec.sampling), draft
        return self._known[prefix]


def _spec_of(sampling: SamplingParams) -> SequenceSpec:
    return SequenceSpec(sampling, seed=0, prompt_length=len(PROMPT), end_token_ids=(END,))


Told = Callable[[CandidateTree], DraftProbs]
"""From candidates to what the drafter says that it drew them from."""


def verified_law(
    models: SampledModels,
    rule: str,
    drafts: Iterable[Draft],
    length: int,
    *,
    told: Told | None = None,
) -> NDArray[np.float64]:
    """The law [V] * length of the first tokens, the target's own following the verdict's."""
    law = np.zeros((VOCAB_SIZE,) * length)
    told = told or models.draft_probs
    for tree, drawn in drafts:
        logits_RV = models.target.logits_RV(PROMPT, tree)
        probs = told(tree)
        coins = Coins()
        with pytest.MonkeyPatch.context() as patch:
            toss_with(coins, patch)
            while True:
                coins.restart()
                verdict = verify(rule, logits_RV, tree, models.spec, PROMPT, probs)
                tokens = (*tree.tokens_of(verdict.accepted), verdict.token_id)[:length]
                left = models.law(tokens, length - len(tokens))
                law[tokens] += drawn * coins.probability * left
                if not coins.turn():
                    break
    return law


def toss_with(coins: Coins, patch: pytest.MonkeyPatch) -> None:
    """Let the coins of `verify`, and the target's own tokens after a window, fall so."""

    def choose_all(draws: Sequence[Draw]) -> list[int]:
        return [_choose(one, coins) for one in draws]

    patch.setattr("workers.verification.verify.KeyedCoins", lambda tree, spec, position: coins)
    patch.setattr("workers.verification.choice.choose_all", choose_all)


def _choose(one: Draw, coins: Coins) -> int:
    weights_N = np.exp(one.kept.log_weights, dtype=np.float64)
    index = coins.toss((weights_N / weights_N.sum()).tolist())
    return index if one.kept.token_ids is None else int(one.kept.token_ids[index])

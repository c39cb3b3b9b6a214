"""Predicted outputs: the text is that of plain decoding, whatever is predicted, and it helps."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from cluster.decoding.policy import POLICIES
from paceline import Completion, GenerateOptions
from paceline.errors import InvalidRequestError
from paceline.limits import MAX_PREDICTION_BYTES
from tests.cluster.system import System, make_checkpoints, running_system

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "The quick brown fox jumps over"
MAX_TOKENS = 48
WORDS = ("the", "and", "in", "a", "is")
"""Each is one token after a space."""
ONE_GROUP = [name for name, policy in POLICIES.all().items() if not policy.replicates]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    checkpoints = make_checkpoints(tmp_path_factory.mktemp("predicted"))
    drafters = {"model": checkpoints.drafter, "more": checkpoints.drafter, "ngram": None}
    async with running_system(checkpoints, drafters=drafters) as system:
        yield system
        await system.settle()


async def _generate(system: System, options: GenerateOptions) -> Completion:
    options = replace(options, logit_bias=await _bias(system))
    return await system.client.generate(PROMPT, options)


async def _bias(system: System) -> dict[int, float]:
    """For answers of whole words: else a text would have other tokens than the answer had."""
    tokenize = system.client.tokenize
    found = [await tokenize(f" {word}", add_special_tokens=False) for word in WORDS]
    assert all(len(one.token_ids) == 1 for one in found)
    return {one.token_ids[0]: 1000.0 for one in found}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("policy", ONE_GROUP)
async def test_the_text_is_plain_decodings(system: System, policy: str, temperature: float) -> None:
    options = GenerateOptions(
        temperature=temperature, seed=5, max_tokens=MAX_TOKENS, ignore_eos=True, policy="off"
    )
    plain = await _generate(system, options)
    half = len(plain.text) // 2
    edited = plain.text[: half - 4] + plain.text[half:]
    for prediction in (plain.text, edited, "An entirely other text. " * 20, ""):
        asked = replace(options, policy=policy, prediction=prediction)
        answer = await _generate(system, asked)
        assert answer.token_ids == plain.token_ids, prediction
        stats = answer.stats
        num_tokens = stats.accepted_prediction_tokens + stats.rejected_prediction_tokens
        assert (num_tokens > 0) is (prediction != "")
        if prediction == plain.text and policy != "off":
            assert stats.accepted_prediction_tokens >= 0.6 * num_tokens
            assert stats.steps <= 0.6 * MAX_TOKENS
    await system.settle()


async def test_rules_without_draft_probabilities_take_it_and_others_ignore_it(
    system: System,
) -> None:
    plain = await _generate(
        system, GenerateOptions(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    )
    asked = GenerateOptions(
        temperature=0.0,
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
        policy="lockstep",
        prediction=plain.text,
    )
    one_hot = await _generate(system, replace(asked, rule="one-hot"))
    assert one_hot.token_ids == plain.token_ids
    assert one_hot.stats.steps <= 0.6 * MAX_TOKENS
    drawn = await _generate(system, replace(asked, rule="rejection"))
    assert drawn.token_ids == plain.token_ids
    assert drawn.stats.drafted > 0, "its drafter drafts"


async def test_each_sample_follows_the_prediction_by_itself(system: System) -> None:
    options = GenerateOptions(temperature=1.0, seed=3, max_tokens=MAX_TOKENS, ignore_eos=True)
    options = replace(options, logit_bias=await _bias(system))
    plain = await system.client.generate(PROMPT, replace(options, policy="off"), samples=2)
    asked = replace(options, policy="chain", prediction=plain[1].text)
    found = await system.client.generate(PROMPT, asked, samples=2)
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    accepted = [one.stats.accepted_prediction_tokens for one in found]
    assert accepted[1] > 2 * accepted[0]


async def test_after_a_wrong_prediction_a_drafter_drafts(system: System) -> None:
    options = GenerateOptions(
        temperature=0.0, max_tokens=400, ignore_eos=True, policy="lockstep", drafter="ngram"
    )
    wrong = await _generate(system, replace(options, prediction="An entirely other text. " * 20))
    without = await _generate(system, options)
    assert wrong.token_ids == without.token_ids
    assert wrong.stats.speculation.proposed > 0
    assert wrong.stats.steps < 400


async def test_a_prediction_that_is_too_long_is_refused(system: System) -> None:
    with pytest.raises(InvalidRequestError, match="prediction"):
        await _generate(system, GenerateOptions(prediction="x" * (MAX_PREDICTION_BYTES + 1)))

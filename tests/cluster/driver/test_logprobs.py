"""Log probabilities end to end: those of transformers, and the same bits however it is decoded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from paceline import Chunk, Completion, GenerateOptions, InvalidRequestError, TokenLogprobs
from paceline.options import OptionFields
from tests.cluster.system import Checkpoints, System, make_checkpoints, running_system

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "The quick brown fox jumps over the lazy dog while the rain falls. " * 6
OPTIONS = GenerateOptions(
    temperature=0.9,
    seed=3,
    top_k=40,
    repetition_penalty=1.3,
    logit_bias={70: 2.0},
    max_tokens=40,
    ignore_eos=True,
    logprobs=4,
    prompt_logprobs=2,
)
"""Temperature, filter, penalty and bias, none of which may change a log probability."""

TOLERANCE = 2e-5
"""Both compute in float32, but add up in other orders. The logits are of size 10."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return make_checkpoints(tmp_path_factory.mktemp("logprobs"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(checkpoints: Checkpoints) -> AsyncIterator[System]:
    """Prompts are computed in chunks of at most 24 tokens."""
    async with running_system(
        checkpoints, drafters={"d0": checkpoints.drafter}, max_num_seqs=8, max_step_tokens=24
    ) as system:
        yield system


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain(system: System) -> Completion:
    return await system.client.generate(PROMPT, replace(OPTIONS, policy="off"))


async def test_they_are_those_of_transformers(checkpoints: Checkpoints, plain: Completion) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoints.target, dtype=torch.float32)
    prompt = plain.prompt_token_ids
    token_ids = torch.tensor([[*prompt, *plain.token_ids]])
    assert len(prompt) > 3 * 24
    with torch.no_grad():
        expected_TV = model(token_ids).logits[0].log_softmax(dim=-1)
    assert plain.prompt_logprobs[0] == TokenLogprobs(None, token=plain.prompt_logprobs[0].token)
    told = [*plain.prompt_logprobs[1:], *plain.logprobs]
    tops = [2] * (len(prompt) - 1) + [4] * 40
    assert len(told) == len(tops)
    for row_V, token_id, one, top in zip(
        expected_TV, token_ids[0, 1:].tolist(), told, tops, strict=False
    ):
        assert one.logprob == pytest.approx(float(row_V[token_id]), abs=TOLERANCE)
        assert one.rank == 1 + int((row_V > row_V[token_id]).sum())
        values, ids = row_V.topk(top)
        assert one.top_ids == tuple(ids.tolist())
        assert one.top_logprobs == pytest.approx(values.tolist(), abs=TOLERANCE)


async def test_the_bytes_of_tokens_are_the_text(plain: Completion) -> None:
    assert b"".join(one.token for one in plain.prompt_logprobs).decode() == PROMPT
    own = b"".join(one.token for one in plain.logprobs).decode(errors="replace")
    assert own == plain.text
    for one in plain.logprobs:
        assert len(one.top_tokens) == len(one.top_ids) == 4


@pytest.mark.parametrize("policy", ["chain", "lockstep"])
async def test_chains_change_no_bit(system: System, plain: Completion, policy: str) -> None:
    drafted = await system.client.generate(PROMPT, replace(OPTIONS, policy=policy))
    assert drafted.stats.accepted > 0
    assert drafted.token_ids == plain.token_ids
    assert drafted.logprobs == plain.logprobs
    assert drafted.prompt_logprobs == plain.prompt_logprobs


@pytest.mark.parametrize("policy", ["fanout", "lockstep"])
async def test_trees_change_no_more_than_the_last_bits(
    system: System, plain: Completion, policy: str
) -> None:
    """Attention adds up a branch beside its stem, so KV of an accepted one has other last bits."""
    options = replace(OPTIONS, policy=policy, window=6, branches=3)
    drafted = await system.client.generate(PROMPT, options)
    assert drafted.stats.accepted > 0
    assert drafted.token_ids == plain.token_ids
    assert drafted.prompt_logprobs == plain.prompt_logprobs
    for one, other in zip(drafted.logprobs, plain.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=TOLERANCE)
        assert (one.rank, one.top_ids) == (other.rank, other.top_ids)


async def test_a_kept_prefix_does_not_shorten_them(system: System, plain: Completion) -> None:
    """Once they are told, or if they are not asked for, the prefix is used."""
    before = (await system.client.stats()).prefix_hit_tokens
    short = replace(OPTIONS, max_tokens=1)
    again = await system.client.generate(PROMPT, short)
    assert again.prompt_logprobs == plain.prompt_logprobs
    assert (await system.client.stats()).prefix_hit_tokens == before
    only_output = await system.client.generate(PROMPT, replace(short, prompt_logprobs=None))
    assert only_output.logprobs == plain.logprobs[:1]
    assert only_output.prompt_logprobs == ()
    assert (await system.client.stats()).prefix_hit_tokens > before


async def test_each_comes_with_its_token(system: System) -> None:
    """Also if the text of the token is held back, since it may begin a stop string."""
    plain = await system.client.generate(PROMPT, replace(OPTIONS, logprobs=0))
    options = replace(OPTIONS, logprobs=0, stop=[plain.text + "?", plain.text[10:14]])
    chunks = []
    async for event in system.client.stream(PROMPT, options):
        if isinstance(event, Chunk):
            assert len(event.logprobs) == len(event.token_ids)
            chunks.append(event)
    logprobs = [one for chunk in chunks for one in chunk.logprobs]
    assert plain.text.index(plain.text[10:14]) == len("".join(chunk.text for chunk in chunks))
    assert tuple(logprobs) == plain.logprobs[: len(logprobs)]
    prompts = [chunk for chunk in chunks if chunk.prompt_logprobs]
    assert chunks[: len(prompts)] == prompts
    assert len(prompts) > 3


async def test_who_does_not_ask_gets_none(system: System, plain: Completion) -> None:
    silent = replace(OPTIONS, logprobs=None, prompt_logprobs=None)
    completion = await system.client.generate(PROMPT, silent)
    assert completion.token_ids == plain.token_ids
    assert completion.logprobs == completion.prompt_logprobs == ()


async def test_a_prompt_of_one_token_has_no_probability(system: System) -> None:
    completion = await system.client.generate([70], replace(OPTIONS, max_tokens=2))
    assert [one.logprob for one in completion.prompt_logprobs] == [None]
    assert len(completion.logprobs) == 2


@pytest.mark.parametrize("asked", [{"logprobs": 21}, {"prompt_logprobs": 21}])
async def test_too_many_are_refused(system: System, asked: OptionFields) -> None:
    with pytest.raises(InvalidRequestError, match="from 0 to 20"):
        await system.client.generate(PROMPT, OPTIONS, **asked)

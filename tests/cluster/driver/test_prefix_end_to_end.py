"""Prefix sharing with a real engine: the text is that without the cache, with less prefill."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from paceline import GenerateOptions
from tests.cluster.system import Checkpoints, System, make_checkpoints, running_system

pytestmark = pytest.mark.asyncio(loop_scope="module")

STEM = [3 + (7 * i * i + i) % 250 for i in range(300)]
"""Two blocks of 128 tokens and the beginning of a third."""
MAX_TOKENS = 40


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return make_checkpoints(tmp_path_factory.mktemp("prefix"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(checkpoints: Checkpoints) -> AsyncIterator[System]:
    async with running_system(checkpoints, drafters={"model": checkpoints.drafter}) as system:
        yield system


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def without(checkpoints: Checkpoints) -> AsyncIterator[System]:
    async with running_system(checkpoints, prefix_cache=False) as system:
        yield system


async def texts(
    system: System, requests: list[tuple[list[int], GenerateOptions]]
) -> list[tuple[int, ...]]:
    answers = await asyncio.gather(
        *(system.client.generate(prompt, options) for prompt, options in requests)
    )
    await system.settle()
    return [answer.token_ids for answer in answers]


def with_stem(
    policy: str, *, branches: int = 1, tenant: str = "", temperature: float = 1.0
) -> GenerateOptions:
    return GenerateOptions(
        temperature=temperature,
        seed=5,
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
        policy=policy,
        branches=branches,
        tenant=tenant,
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_shared_blocks_give_the_text_of_prompts_computed_whole(
    system: System, without: System, temperature: float
) -> None:
    prompts = [[*STEM, 100 + number] for number in range(4)]
    plain = with_stem("off", temperature=temperature)
    expected = await texts(without, [(prompt, plain) for prompt in prompts])
    before = await system.client.stats()
    for policy in ("off", "chain", "lockstep"):
        options = with_stem(policy, temperature=temperature)
        assert await texts(system, [(prompt, options) for prompt in prompts]) == expected
    after = await system.client.stats()
    assert after.prefix_hit_tokens - before.prefix_hit_tokens >= 11 * 256
    assert (await without.client.stats()).prefix_hit_tokens == 0


async def test_an_answer_is_a_prefix_of_the_next_question(system: System, without: System) -> None:
    """Blocks that were filled while decoding, with windows, are shared like those of prompts."""
    question = STEM[:250]
    [answer] = await texts(system, [(question, with_stem("chain", tenant="talk"))])
    longer = [*question, *answer, 9]
    before = (await system.client.stats()).prefix_hit_tokens
    expected = await texts(without, [(longer, with_stem("off"))])
    assert await texts(system, [(longer, with_stem("chain", tenant="talk"))]) == expected
    assert (await system.client.stats()).prefix_hit_tokens - before == 256
    for asked, cached in ((system, 256), (without, 0)):
        told = await asked.client.generate(longer, with_stem("chain", tenant="talk"))
        assert told.stats.cached_prompt_tokens == cached
    samples = await system.client.generate(longer, with_stem("off", tenant="new"), samples=2)
    assert samples[0].stats.cached_prompt_tokens == 0


async def test_tenants_do_not_share(system: System) -> None:
    before = (await system.client.stats()).prefix_hit_tokens
    for tenant in ("north", "south"):
        await texts(system, [(STEM, with_stem("off", tenant=tenant))])
    assert (await system.client.stats()).prefix_hit_tokens == before


async def test_a_tree_beside_shared_blocks_leaves_them_as_they_are(
    system: System, without: System
) -> None:
    expected = await texts(without, [([*STEM, 8], with_stem("off"))])
    trees = [([*STEM, 8, tail], with_stem("lockstep", branches=3)) for tail in range(10, 14)]
    requests = [*trees, ([*STEM, 8], with_stem("chain"))]
    assert (await texts(system, requests))[-1:] == expected
    assert await texts(system, [([*STEM, 8], with_stem("off"))]) == expected

"""The coupled rule gives the text of plain decoding with every drafter, tree, policy, and stopping.

All combinations for a drafter run at once, so that windows of many shapes share steps.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import product

import pytest
import pytest_asyncio

from cluster.decoding.token_tree import MAX_MERGED
from paceline import Completion, GenerateOptions
from paceline.options import Stopping
from tests.cluster.system import (
    Checkpoints,
    DrafterChoice,
    System,
    make_checkpoints,
    running_system,
)
from tests.release import at_release
from workers.drafting.kind import DrafterOptions

pytestmark = pytest.mark.asyncio(loop_scope="module")

KINDS = ("model", "parallel", "ngram", "recycling", "suffix")
POLICIES = ("lockstep", "chain", "pearl", "fanout", "auto")
BRANCHES = (1, 2, 4)
PROMPTS = ("The quick brown fox jumps over", "sea wind sea wind sea")
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    made = make_checkpoints(tmp_path_factory.mktemp("rules"))
    parallel = made.drafter.with_name("parallel")
    shutil.copytree(made.drafter, parallel)
    config = json.loads((parallel / "config.json").read_text())
    (parallel / "config.json").write_text(json.dumps(config | {"pard_token": 3}))
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["processes", "in the driver"])
async def system(checkpoints: Checkpoints, request: pytest.FixtureRequest) -> AsyncIterator[System]:
    """Drafters without a model are reached by gRPC, or draft in the driver."""
    parallel = checkpoints.drafter.with_name("parallel")
    drafters: dict[str, DrafterChoice] = {"model": checkpoints.drafter, "parallel": parallel}
    own = {}
    if request.param == "processes":
        drafters |= {"ngram": None, "recycling": "recycling", "suffix": "suffix"}
    else:
        own = {kind: DrafterOptions(kind) for kind in ("ngram", "recycling", "suffix")}
    async with running_system(checkpoints, drafters=drafters, own_drafters=own) as system:
        yield system
        await system.settle()


def combinations(kind: str, temperature: float) -> list[GenerateOptions]:
    """All requests that a drafter of this kind supports, each with its own seed."""
    return [
        GenerateOptions(
            temperature=temperature,
            seed=seed,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            rule="coupled",
            drafter=kind,
            policy=policy,
            branches=branches,
            stopping=stopping.value,
            window=8,
        )
        for seed, (policy, branches, stopping) in enumerate(product(POLICIES, BRANCHES, Stopping))
        if branches == 1 or policy != "pearl"
    ]


async def generate_all(
    system: System, prompt: str, requests: list[GenerateOptions]
) -> list[Completion]:
    return await asyncio.gather(*(system.client.generate(prompt, one) for one in requests))


@pytest.mark.parametrize("temperature", [1.0, *at_release([0.0])])
@pytest.mark.parametrize("kind", KINDS)
async def test_coupled_is_plain_decoding(system: System, kind: str, temperature: float) -> None:
    requests = combinations(kind, temperature)
    num_drafted = 0
    for prompt in PROMPTS:
        plain = await generate_all(system, prompt, [replace(one, policy="off") for one in requests])
        drafted = await generate_all(system, prompt, requests)
        for options, expected, found in zip(requests, plain, drafted, strict=True):
            assert found.token_ids == expected.token_ids, options
            num_drafted += found.stats.drafted
    assert num_drafted > 0
    await system.settle()
    assert all(worker.malformed == 0 for worker in system.driver.stats().workers)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_merged_drafters_are_plain_decoding(system: System, temperature: float) -> None:
    requests = [
        GenerateOptions(
            temperature=temperature,
            seed=seed,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            merge=True,
            policy=policy,
            branches=branches,
            window=8,
        )
        for seed, (policy, branches) in enumerate(product(POLICIES, (1, 2)))
        if policy != "pearl"
    ]
    for prompt in PROMPTS:
        plain = await generate_all(system, prompt, [replace(one, policy="off") for one in requests])
        merged = await generate_all(system, prompt, requests)
        for options, expected, found in zip(requests, plain, merged, strict=True):
            assert found.token_ids == expected.token_ids, options
    await system.settle()
    workers = system.driver.stats().workers
    assert all(worker.malformed == 0 for worker in workers)
    drafted = [worker.kind for worker in workers if worker.tokens > 0 and worker.kind != "target"]
    assert len(drafted) >= MAX_MERGED, "a request merges that many; the next may merge others"

"""Policy spread over real workers: the text of plain decoding, even if one of them is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from paceline import GenerateOptions
from paceline.errors import InvalidRequestError
from tests.cluster.system import (
    Checkpoints,
    System,
    eventually,
    make_checkpoints,
    running_system,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPTS = ("The quick brown fox", "def add(left", "sea sea sea sea sea")
OPTIONS = GenerateOptions(temperature=1.0, max_tokens=32, ignore_eos=True, window=4)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    folder: Path = tmp_path_factory.mktemp("spread")
    return make_checkpoints(folder)


@pytest_asyncio.fixture(loop_scope="module")
async def system(checkpoints: Checkpoints) -> AsyncIterator[System]:
    """Two models and another kind of drafter, and a target slow enough to use all of them."""
    drafters = {"a": checkpoints.drafter, "b": checkpoints.drafter, "c": None}
    async with running_system(checkpoints, drafters=drafters, target_rtt_ms=10) as system:
        yield system


def rows(policy: str, branches: int = 1) -> list[GenerateOptions]:
    return [
        replace(OPTIONS, policy=policy, branches=branches, seed=seed)
        for seed in range(len(PROMPTS))
    ]


async def answers(system: System, options: list[GenerateOptions]) -> list[tuple[int, ...]]:
    found = await asyncio.gather(
        *(system.client.generate(prompt, one) for prompt, one in zip(PROMPTS, options, strict=True))
    )
    return [one.token_ids for one in found]


@pytest.mark.parametrize("branches", [1, 2])
async def test_equal_text_with_one_sequence_and_with_several(system: System, branches: int) -> None:
    plain = await answers(system, rows("off"))
    assert await answers(system, rows("spread", branches)) == plain
    for prompt, options, expected in zip(PROMPTS, rows("spread", branches), plain, strict=True):
        alone = await system.client.generate(prompt, options)
        assert alone.token_ids == expected
        assert alone.stats.speculation.proposed > 0
    await system.settle()
    await eventually(lambda: all(one.passes > 0 for one in system.driver.stats().workers))
    assert all(one.malformed == 0 for one in system.driver.stats().workers)


async def test_equal_text_when_a_drafter_goes(system: System) -> None:
    plain = await answers(system, rows("off"))
    under_way = asyncio.create_task(answers(system, rows("spread")))
    await eventually(lambda: system.driver.scheduler.num_running > 0)
    await system.drafters["a"].stop()
    assert await under_way == plain
    await eventually(lambda: "a" not in system.connected())
    assert await answers(system, rows("spread")) == plain
    await system.settle()


async def test_one_drafter_is_refused(checkpoints: Checkpoints) -> None:
    async with running_system(checkpoints, drafters={"a": checkpoints.drafter}) as system:
        with pytest.raises(InvalidRequestError, match="at least 2 drafters"):
            await system.client.generate(PROMPTS[0], replace(OPTIONS, policy="spread"))

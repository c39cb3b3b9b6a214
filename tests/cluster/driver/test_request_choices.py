"""What a request chooses reaches its drafter, and what does not fit is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Unpack

import pytest
import pytest_asyncio

from paceline import Completion, GenerateOptions
from paceline.errors import InvalidRequestError
from paceline.options import OptionFields
from tests.cluster.system import (
    Checkpoints,
    DrafterChoice,
    System,
    make_checkpoints,
    running_system,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPTS = ("The quick brown fox", "sea sea sea sea sea")
KINDS = ("model", "ngram", "recycling")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return make_checkpoints(tmp_path_factory.mktemp("trees"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(checkpoints: Checkpoints) -> AsyncIterator[System]:
    async with running_system(checkpoints, drafters=_drafters(checkpoints)) as system:
        yield system


def _drafters(checkpoints: Checkpoints) -> dict[str, DrafterChoice]:
    """One drafter of each kind."""
    return {"d0": checkpoints.drafter, "d1": None, "d2": "recycling"}


def _options(row: int, temperature: float, /, **others: Unpack[OptionFields]) -> GenerateOptions:
    options = GenerateOptions(seed=row, temperature=temperature, max_tokens=24, ignore_eos=True)
    return replace(options, **others)


async def _same_text(
    system: System, temperature: float, /, **others: Unpack[OptionFields]
) -> list[Completion]:
    """Answer all prompts. Each must have plain decoding's text, without malformed proposals."""
    answers = []
    for row, prompt in enumerate(PROMPTS):
        options = _options(row, temperature, **others)
        plain = await system.client.generate(prompt, replace(options, policy="off"))
        answer = await system.client.generate(prompt, options)
        assert answer.token_ids == plain.token_ids, others
        assert answer.origins.count("draft") == answer.stats.accepted
        answers.append(answer)
    await system.settle()
    workers = system.driver.stats().workers
    assert {worker.name: worker.malformed for worker in workers} == {w.name: 0 for w in workers}
    assert system.connected() == {"shard-0", "d0", "d1", "d2"}
    return answers


@pytest.mark.parametrize("stopping", ["adaedl", "confidence", "cost"])
@pytest.mark.parametrize("branches", [1, 3])
async def test_stopping_rules_keep_the_text_and_show_their_state(
    system: System, stopping: str, branches: int
) -> None:
    """Lockstep waits for the drafter. Under chain, the tiny target may outrun any drafter."""
    answers = await _same_text(
        system, 1.0, drafter="model", policy="lockstep", stopping=stopping, branches=branches
    )
    assert all(answer.stats.stopping_state for answer in answers)


@pytest.mark.parametrize(
    ("rule", "kind", "branches"),
    [
        ("rejection", "model", 1),
        ("kseq", "model", 1),
        ("kseq", "model", 3),
        ("recursive", "model", 2),
        ("mcsd", "model", 2),
        ("one-hot", "ngram", 2),
        ("one-hot", "recycling", 2),
    ],
)
async def test_rules_that_keep_the_law(system: System, rule: str, kind: str, branches: int) -> None:
    """Greedy texts equal plain decoding's. Sampled requests run to their end."""
    for policy in ("chain", "lockstep"):
        chosen: OptionFields = {
            "rule": rule,
            "drafter": kind,
            "branches": branches,
            "policy": policy,
        }
        greedy = await _same_text(system, 0.0, **chosen)
        # Under chain, the tiny target may outrun any drafter.
        shown = [answer.stats for answer in greedy]
        assert policy == "chain" or sum(stats.accepted for stats in shown) > 0, shown
        sampled = await system.client.generate(PROMPTS[1], _options(7, 1.0, **chosen))
        assert len(sampled.token_ids) == 24
    await system.settle()


@pytest.mark.parametrize("kind", KINDS)
async def test_the_drafter_that_was_asked_for_drafts(checkpoints: Checkpoints, kind: str) -> None:
    """Each kind has its own system, because a request's last pass is reported after its end."""
    async with running_system(checkpoints, drafters=_drafters(checkpoints)) as system:
        await system.client.generate(PROMPTS[1], _options(1, 0.0, drafter=kind, policy="lockstep"))
        workers = system.driver.stats().workers
    busy = {worker.kind for worker in workers if worker.passes}
    assert busy == {"target", kind}


async def test_what_does_not_fit_is_refused(checkpoints: Checkpoints, system: System) -> None:
    with pytest.raises(InvalidRequestError, match=r"'kseq'.*'ngram'") as caught:
        await system.client.generate("x", _options(0, 1.0, rule="kseq", drafter="ngram"))
    assert caught.value.field == "rule"
    async with running_system(checkpoints, drafters={"d": None}) as alone:
        with pytest.raises(InvalidRequestError, match="'model' is deployed"):
            await alone.client.generate("x", _options(0, 1.0, drafter="model"))
        with pytest.raises(InvalidRequestError, match=r"'rejection'.*'ngram'"):
            await alone.client.generate("x", _options(0, 1.0, rule="rejection"))
        await alone.client.generate("x", _options(0, 1.0, rule="rejection", policy="off"))

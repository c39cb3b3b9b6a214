"""Pairs of models with one tokenizer, padded to different numbers of token ids, and with two.

An example is Qwen2.5's 7B (152,064) and 0.5B (151,936). Ids that only one side has are no fault.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from paceline import GenerateOptions
from paceline.generation import WorkerStats
from tests.cluster.system import HOST, Checkpoints, System, eventually, running_system
from tests.tiny import make_scripted_checkpoint, make_tiny_checkpoint
from workers.drafting.drafter import serve_drafter
from workers.drafting.kind import DrafterOptions
from workers.drafting.kinds.model import ModelOptions

SIZE, PADDED = 384, 448
FOREIGN = tuple(range(SIZE, PADDED))
NONE_FOREIGN = dict.fromkeys(FOREIGN, -100.0)
"""A bias with which a padded target chooses only ids that both models have."""
PROMPT = "The quick brown fox jumps"
OPTIONS = GenerateOptions(
    temperature=1.0, seed=5, max_tokens=100, ignore_eos=True, policy="lockstep", window=4
)
RULES = ("coupled", "rejection", "kseq", "recursive", "mcsd")
OTHERS = (
    *(("coupled", policy) for policy in ("lockstep", "chain", "fanout")),
    *((rule, "lockstep") for rule in RULES[1:]),
)


def pair(folder: Path, *, target: int | None, drafter: int | None) -> Checkpoints:
    """Models with the same weights, except for the additional rows of one of them."""
    return Checkpoints(
        make_tiny_checkpoint(folder / "target", vocab_size=SIZE, padded_to=target),
        make_tiny_checkpoint(folder / "drafter", vocab_size=SIZE, padded_to=drafter),
    )


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoints]:
    folder = tmp_path_factory.mktemp("padded")
    return {
        "smaller": pair(folder / "smaller", target=PADDED, drafter=None),
        "larger": pair(folder / "larger", target=None, drafter=PADDED),
    }


def drafter_of(system: System) -> WorkerStats:
    return next(one for one in system.driver.stats().workers if one.name == "d")


async def test_ids_that_the_drafter_lacks_end_its_work_for_their_sequence_alone(
    checkpoints: dict[str, Checkpoints],
) -> None:
    pair = checkpoints["smaller"]
    async with running_system(
        pair, drafters={"d": pair.drafter}, target_rtt_ms=5.0, wait_ms=5000.0
    ) as system:
        known = replace(OPTIONS, logit_bias=NONE_FOREIGN, max_tokens=200)
        plain = await system.client.generate(PROMPT, replace(known, policy="off"))
        foreign = replace(
            OPTIONS, logit_bias={FOREIGN[3]: 100.0}, stop_token_ids=(FOREIGN[0],), max_tokens=8
        )
        began = asyncio.Event()

        async def bystander() -> tuple[list[int], int]:
            ids: list[int] = []
            accepted = 0
            async for event in system.client.stream(PROMPT, known):
                if hasattr(event, "token_ids"):
                    ids += event.token_ids
                    began.set()
                if hasattr(event, "stats") and event.stats is not None:
                    accepted = event.stats.accepted
            return ids, accepted

        watched = asyncio.create_task(bystander())
        await began.wait()
        for number in range(4):
            says = await system.client.generate(PROMPT, replace(foreign, seed=number))
            assert FOREIGN[3] in says.token_ids
            asked = await system.client.generate([FOREIGN[1], 9, 9], replace(foreign, seed=number))
            assert asked.stats.drafted == 0
        ids, accepted = await watched
        assert ids == list(plain.token_ids)
        assert accepted > 100
        told = drafter_of(system)
        assert (told.reconnects, told.connected, told.suspect) == (0, True, False)
        await system.settle()


@pytest.fixture
async def larger(checkpoints: dict[str, Checkpoints]) -> AsyncIterator[System]:
    pair = checkpoints["larger"]
    async with running_system(pair, drafters={"d": pair.drafter}, wait_ms=5000.0) as system:
        yield system


async def test_a_larger_drafter_proposes_no_id_that_the_target_lacks(larger: System) -> None:
    for rule in RULES:
        for temperature in (0.0, 1.0):
            options = replace(OPTIONS, rule=rule, temperature=temperature)
            if rule not in ("coupled", "rejection"):
                options = replace(options, branches=2)
            plain = await larger.client.generate(PROMPT, replace(options, policy="off"))
            answer = await larger.client.generate(PROMPT, options)
            assert answer.stats.accepted > 50, rule
            if rule == "coupled" or temperature == 0.0:
                assert answer.token_ids == plain.token_ids
            told = drafter_of(larger)
            assert (told.malformed, told.suspect, told.reconnects) == (0, False, 0), rule
    await larger.settle()


async def test_a_drafter_with_another_tokenizer(tmp_path: Path) -> None:
    """Both know the same text, in tokens that divide it at other places."""
    begin, text = (
        "#",
        "the quick brown fox jumps over a lazy dog; it rains on the plain: 60 km, " * 3,
    )
    target, drafter = (
        make_scripted_checkpoint(tmp_path / name, {begin: text}, seed=seed)
        for name, seed in (("target", 0), ("drafter", 1))
    )
    both = Checkpoints(target, drafter)
    own = DrafterOptions(
        "model", drafter, weights="float32", of_kind=ModelOptions(tokenizer=target)
    )
    server = await serve_drafter(own, host=HOST)
    try:
        async with running_system(
            both,
            drafter_addresses={"d": server.address},
            target_rtt_ms=5.0,
            wait_ms=5000.0,
        ) as system:
            await eventually(lambda: system.connected() >= {"d"})
            for temperature in (0.0, 1.0):
                options = replace(OPTIONS, max_tokens=40, temperature=temperature)
                plain = await system.client.generate(begin, replace(options, policy="off"))
                for rule, policy in OTHERS:
                    options = replace(options, rule=rule, policy=policy)
                    answer = await system.client.generate(begin, options)
                    told = drafter_of(system)
                    assert (told.malformed, told.suspect, told.reconnects) == (0, False, 0)
                    if rule == "coupled" or temperature == 0.0:
                        assert answer.token_ids == plain.token_ids
                    if temperature == 0.0 and policy == "lockstep":
                        assert answer.stats.accepted > 5, rule
            await system.settle()
    finally:
        await server.stop()

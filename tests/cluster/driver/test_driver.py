"""The driver over real servers: equal text under all circumstances, and nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import product
from typing import Unpack

import pytest
import pytest_asyncio

from paceline import Chunk, Completion, GenerateOptions, Message, Started
from paceline.errors import UnavailableError
from paceline.generation import CompletionBuilder
from paceline.options import OptionFields
from tests.cluster.system import Checkpoints, System, make_checkpoints, running_system, start_target

POLICIES = ("lockstep", "pearl", "chain", "fanout", "auto")
pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPTS = ("The quick brown fox", "def add(left", "Übung macht den Meister", "sea sea sea sea sea")
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return make_checkpoints(tmp_path_factory.mktemp("driver"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(checkpoints: Checkpoints) -> AsyncIterator[System]:
    drafters = {"drafter-0": checkpoints.drafter}
    async with running_system(checkpoints, drafters=drafters) as system:
        yield system


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ngram_system(checkpoints: Checkpoints) -> AsyncIterator[System]:
    async with running_system(checkpoints, drafters={"drafter-0": None}) as system:
        yield system


def _options(row: int, temperature: float, /, **others: Unpack[OptionFields]) -> GenerateOptions:
    options = GenerateOptions(
        seed=100 + row,
        temperature=temperature,
        max_tokens=MAX_TOKENS,
        presence_penalty=0.5 * (row % 2),
    )
    return replace(options, **others)


async def _answers(
    system: System,
    temperature: float,
    /,
    *,
    concurrency: int,
    **others: Unpack[OptionFields],
) -> list[Completion]:
    gate = asyncio.Semaphore(concurrency)

    async def answer(row: int, prompt: str) -> Completion:
        async with gate:
            return await system.client.generate(prompt, _options(row, temperature, **others))

    return list(await asyncio.gather(*(answer(row, p) for row, p in enumerate(PROMPTS))))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["model", "ngram"])
async def test_equal_text(
    system: System, ngram_system: System, kind: str, temperature: float
) -> None:
    chosen = system if kind == "model" else ngram_system
    plain = await _answers(chosen, temperature, concurrency=1, policy="off")
    accepted = 0
    for policy, (window, concurrency) in product(POLICIES, ((1, 4), (2, 1), (4, 4), (8, 1))):
        answers = await _answers(
            chosen, temperature, concurrency=concurrency, policy=policy, window=window
        )
        for expected, got in zip(plain, answers, strict=True):
            assert got.token_ids == expected.token_ids, (policy, window, concurrency)
            assert (got.text, got.finish_reason) == (expected.text, expected.finish_reason)
            assert got.origins.count("draft") == got.stats.accepted
        accepted += sum(answer.stats.accepted for answer in answers)
    assert accepted > 0 or (kind == "ngram" and temperature == 1.0)
    assert all(answer.stats.drafted == 0 for answer in plain)
    await chosen.settle()


async def test_what_a_stream_holds(system: System) -> None:
    messages = [Message("system", "Be brief."), Message("user", "Tell me of the sea.")]
    options = GenerateOptions(max_tokens=16, seed=3, request_id="mine", ignore_eos=True)
    events = [event async for event in system.client.stream(messages, options)]
    started, finished = events[0], events[-1]
    assert isinstance(started, Started)
    assert (started.request_id, started.seed) == ("mine", 3)
    assert started.prompt_token_ids[0] == 1
    offset = 0
    for event in events[1:-1]:
        assert isinstance(event, Chunk)
        assert event.offset == offset
        assert len(event.pieces) == len(event.origins) == len(event.token_ids)
        assert "".join(event.pieces) == event.text
        offset += len(event.token_ids)
    completion = CompletionBuilder().extend(events).build()
    assert offset == len(completion.token_ids) == 16
    assert completion.finish_reason == "length"
    assert completion.stats.acceptance_length == 16 / completion.stats.steps
    assert 0 < completion.stats.ttft_seconds <= completion.stats.seconds
    assert finished is events[-1]


async def test_the_seed_that_was_picked_gives_the_text_again(system: System) -> None:
    first = await system.client.generate(
        "The rain", GenerateOptions(temperature=1.0, max_tokens=16)
    )
    again = await system.client.generate(
        "The rain", GenerateOptions(temperature=1.0, max_tokens=16, seed=first.seed)
    )
    assert again.token_ids == first.token_ids


async def test_stop_strings_inside_a_window(system: System) -> None:
    """Any short piece of the plain text ends it there, under every policy."""
    base = GenerateOptions(temperature=1.0, seed=9, max_tokens=64, ignore_eos=True, policy="off")
    plain = await system.client.generate("The fox", base)
    for begin in (3, 10, 20):
        stop = plain.text[begin : begin + 3]
        cut = plain.text.find(stop)
        endings = set()
        for policy in ("off", "lockstep", "chain"):
            options = GenerateOptions(
                temperature=1.0, seed=9, max_tokens=64, ignore_eos=True, policy=policy, stop=[stop]
            )
            answer = await system.client.generate("The fox", options)
            assert answer.finish_reason == "stop"
            assert answer.text == plain.text[:cut]
            assert plain.token_ids[: len(answer.token_ids)] == answer.token_ids
            endings.add(len(answer.token_ids))
        assert len(endings) == 1
    await system.settle()


async def test_end_tokens_end_the_text_and_can_be_ignored(system: System) -> None:
    base = GenerateOptions(temperature=1.0, seed=4, max_tokens=32, ignore_eos=True)
    plain = await system.client.generate("The fox", base)
    token_id = plain.token_ids[12]
    first = plain.token_ids.index(token_id)
    options = GenerateOptions(temperature=1.0, seed=4, max_tokens=32, stop_token_ids=[token_id],
                              ignore_eos=True)  # fmt: skip
    answer = await system.client.generate("The fox", options)
    assert answer.token_ids == plain.token_ids[: first + 1]
    assert answer.finish_reason == "stop"
    assert plain.text.startswith(answer.text)


async def test_cancelling_frees_what_was_held(checkpoints: Checkpoints) -> None:
    """A whole answer would take 400 steps of 5 ms. The next request takes a step for each token."""
    async with running_system(checkpoints, drafters={"d": None}, target_rtt_ms=5) as system:
        options = GenerateOptions(max_tokens=400, ignore_eos=True, policy="off", seed=1)
        stream = system.client.stream("The quick brown fox", options)
        seen = 0
        async for event in stream:
            seen += isinstance(event, Chunk)
            if seen == 3:
                break
        await stream.aclose()
        await system.settle()
        cancelled = system.driver.stats()
        assert cancelled.committed_tokens < 300
        await system.client.generate("x", replace(options, max_tokens=5))
        await system.settle()
        assert system.driver.stats().committed_tokens == cancelled.committed_tokens + 5


async def test_many_at_once_and_some_cancelled(system: System) -> None:
    async def one(row: int) -> Completion | None:
        options = GenerateOptions(max_tokens=40, ignore_eos=True, seed=row, temperature=1.0)
        if row % 3:
            return await system.client.generate(PROMPTS[row % 4], options)
        async for event in system.client.stream(PROMPTS[row % 4], options):
            if isinstance(event, Chunk) and event.offset > row:
                break
        return None

    answers = await asyncio.gather(*(one(row) for row in range(12)))
    await system.settle()
    alone = GenerateOptions(max_tokens=40, ignore_eos=True, seed=4, temperature=1.0, policy="off")
    expected = await system.client.generate(PROMPTS[0], alone)
    assert answers[4] is not None
    assert answers[4].token_ids == expected.token_ids


async def test_a_reader_who_does_not_read_stalls_nobody(system: System) -> None:
    generation = await system.driver.submit(
        "The quick", GenerateOptions(max_tokens=200, ignore_eos=True, policy="off")
    )
    await system.settle()
    answer = CompletionBuilder()
    async for event in generation:
        answer.add(event)
    assert len(answer.build().token_ids) == 200


async def test_shards_that_are_no_group_are_not_stepped(checkpoints: Checkpoints) -> None:
    second = await start_target(checkpoints.target)
    try:
        with pytest.raises(UnavailableError, match="is shard 0 of 1; expected shard 0 of 2"):
            async with running_system(
                checkpoints, more_targets=(second.address,), connect_seconds=5.0
            ):
                pass
    finally:
        await second.stop()


async def test_stats(system: System) -> None:
    before = await system.client.stats()
    options = GenerateOptions(max_tokens=32, ignore_eos=True, policy="lockstep")
    await system.client.generate("The fox", options)
    after = await system.client.stats()
    assert after.committed_tokens - before.committed_tokens == 32
    assert after.requests_finished - before.requests_finished == 1
    assert after.uptime_seconds > before.uptime_seconds
    assert after.gap_ms_p50 > 0
    shard, drafter = after.workers
    assert (shard.name, shard.kind, shard.connected) == ("shard-0", "target", True)
    assert (drafter.name, drafter.kind, drafter.connected) == ("drafter-0", "model", True)
    assert shard.busy_seconds > before.workers[0].busy_seconds
    assert 0 < shard.busy_seconds < after.uptime_seconds
    assert shard.pid > 0
    assert drafter.passes > 0
    assert drafter.tokens > 0
    assert drafter.reconnects == 0


async def test_description(system: System) -> None:
    description = await system.client.describe()
    assert description.model == "target"
    assert description.vocab_size == 384
    assert description.end_token_ids == (2, 0)
    assert description.default_sampling.greedy
    assert description.default_policy == "chain"
    fitting = {"off", *POLICIES[:-1], "auto"}
    assert description.policies == tuple(sorted(fitting)), "no 2 drafters, no 2 groups"

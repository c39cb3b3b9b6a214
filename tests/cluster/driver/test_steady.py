"""Steady answers: sizes and times do not tell which tokens were accepted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import pytest
import pytest_asyncio

from cluster.decoding.instructions import Finish, FinishReason
from cluster.driver.steady import (
    CALM,
    FIRST_INTERVAL,
    LEAD,
    LONGEST_INTERVAL,
    SHORTEST_INTERVAL,
    Answer,
    Pace,
    Pacer,
)
from paceline import Chunk, Finished, GenerateOptions, RequestStats
from paceline.generation import Origin
from paceline.v1 import inference_pb2_grpc
from paceline.wire.answers import PADDED_TO, event_to_wire
from paceline.wire.requests import request_to_wire
from tests.cluster.system import (
    Checkpoints,
    System,
    eventually,
    make_checkpoints,
    running_system,
)

PROMPT = "The quick brown fox jumps"
OPTIONS = GenerateOptions(
    temperature=1.0, seed=11, max_tokens=150, ignore_eos=True, policy="chain", window=6
)
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return make_checkpoints(tmp_path_factory.mktemp("steady"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(checkpoints: Checkpoints) -> AsyncIterator[System]:
    drafters = {"d0": checkpoints.drafter}
    async with running_system(checkpoints, drafters=drafters, target_rtt_ms=10) as system:
        yield system


async def _gaps(system: System, options: GenerateOptions) -> list[tuple[str, float]]:
    """For each token its origin, and the seconds until the next one."""
    arrived: list[tuple[str, float]] = []
    async for event in system.client.stream(PROMPT, options):
        if isinstance(event, Chunk):
            now = time.monotonic()
            arrived += [(origin, now) for origin in event.origins]
    return [(origin, after - then) for (origin, then), (_, after) in pairwise(arrived)]


def _separation(gaps: list[tuple[str, float]]) -> float:
    """Chance that the target's own token comes with a longer gap than an accepted one.

    It is 1/2 if gaps tell nothing.
    """
    target = [gap for origin, gap in gaps if origin == "target"]
    draft = [gap for origin, gap in gaps if origin == "draft"]
    assert min(len(target), len(draft)) >= 20
    wins = sum((one > other) + (one == other) / 2 for one in target for other in draft)
    return wins / len(target) / len(draft)


@pytest.mark.timing
async def test_times_do_not_tell_accepted_tokens(system: System) -> None:
    """One answer's separation strays by some 0.1, since gaps depend on each other: so the mean of
    six, which strays by 0.04."""
    plain = await system.client.generate(PROMPT, OPTIONS)
    assert _separation(await _gaps(system, OPTIONS)) > 0.9, "what a steady answer hides"
    steady = replace(OPTIONS, steady=True)
    found: list[float] = []
    found_before: list[float] = []
    for seed in range(11, 17):
        gaps = await _gaps(system, replace(steady, seed=seed))
        # Gaps before tokens tell no more than gaps after them.
        before = [(origin, gap) for (_, gap), (origin, _) in pairwise(gaps)]
        found.append(_separation(gaps))
        found_before.append(_separation(before))
    assert abs(fmean(found) - 0.5) < 0.2, found
    assert abs(fmean(found_before) - 0.5) < 0.2, found_before
    answer = await system.client.generate(PROMPT, steady)
    assert (answer.token_ids, answer.text) == (plain.token_ids, plain.text)
    assert answer.finish_reason == plain.finish_reason


async def test_sizes_do_not_tell_anything(system: System) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(system.client._channel)
    request = request_to_wire(PROMPT, replace(OPTIONS, steady=True, max_tokens=40))
    sizes = []
    async for response in stub.Generate(request):
        if response.WhichOneof("message") == "chunk":
            assert len(response.chunk.token_ids) == 1
            sizes.append(response.chunk.ByteSize())
    assert len(sizes) == 40
    assert set(sizes) == {PADDED_TO}


async def test_every_length_of_text_is_padded() -> None:
    for length in range(2 * PADDED_TO):
        text = "x" * length
        chunk = Chunk(5, (7,), ("target",), text, (text,), padded=True)
        bare = event_to_wire(replace(chunk, padded=False)).chunk.ByteSize()
        size = event_to_wire(chunk).chunk.ByteSize()
        assert size % PADDED_TO == 0
        assert 0 <= size - bare <= PADDED_TO


async def test_a_steady_answer_that_breaks_off_is_resumed(system: System) -> None:
    steady = replace(OPTIONS, steady=True, max_tokens=30)
    whole = await system.client.generate(PROMPT, steady)
    rest = await system.client.generate(
        whole.prompt_token_ids, replace(steady, resume=whole.token_ids[:11])
    )
    assert rest.token_ids == whole.token_ids[11:]


async def test_one_that_is_cancelled_or_lost_leaves_nothing(system: System) -> None:
    stream = system.client.stream(PROMPT, replace(OPTIONS, steady=True))
    async for event in stream:
        if isinstance(event, Chunk):
            break
    await stream.aclose()
    await system.settle()
    async with asyncio.timeout(60):
        while system.driver._pace.num_open:
            await asyncio.sleep(0.01)


async def test_draining_waits_for_tokens_that_wait_for_their_turn(
    checkpoints: Checkpoints,
) -> None:
    async with running_system(checkpoints) as system:
        options = replace(OPTIONS, steady=True, max_tokens=30, policy="off")
        asked = asyncio.create_task(system.client.generate(PROMPT, options))
        async with asyncio.timeout(60):
            while not system.driver.stats().committed_tokens:
                await asyncio.sleep(0.01)
        assert await system.driver.drain(60) == 0
        assert len((await asked).token_ids) == 30


# The pace


def _ended(seconds: float, tokens: int = 101) -> Finish:
    stats = RequestStats(50, 0, 0, tokens / 50, seconds + 1.0, 1.0)
    return Finish(1, FinishReason.LENGTH, stats, tokens)


async def test_the_pace_comes_from_earlier_requests() -> None:
    pace = Pace()
    assert pace.interval == FIRST_INTERVAL
    pace.observe(_ended(seconds=0.0, tokens=3))
    assert pace.interval == FIRST_INTERVAL, "too few tokens to tell"
    pace.observe(_ended(seconds=1.0))
    assert 0.0125 <= pace.interval < 0.0125 * 2**0.5
    before = pace.interval
    pace.observe(_ended(seconds=1.05))
    assert pace.interval == before, "it is rounded"
    for seconds, bound in ((1e-3, SHORTEST_INTERVAL), (1e4, LONGEST_INTERVAL)):
        for _ in range(200):
            pace.observe(_ended(seconds=seconds))
        assert bound <= pace.interval < bound * 2**0.5


class _Reader:
    """Notes what a pacer gives, and when."""

    def __init__(self) -> None:
        self.given: list[tuple[Answer, float]] = []
        self.ended: list[Pacer] = []

    def give(self, answer: Answer) -> None:
        self.given.append((answer, asyncio.get_running_loop().time()))

    def pacer(self, interval: float) -> Pacer:
        return Pacer(self.give, interval, on_end=self.ended.append)


def _chunk(offset: int, count: int) -> Chunk:
    pieces = tuple("abcdefghi"[:count])
    token_ids = tuple(range(offset, offset + count))
    origin: Origin = "target"
    return Chunk(offset, token_ids, (origin,) * count, "".join(pieces), pieces)


async def test_when_no_token_is_ready_the_interval_doubles_and_later_recovers() -> None:
    reader = _Reader()
    pacer = reader.pacer(0.004)
    begin = asyncio.get_running_loop().time()
    pacer.put(_chunk(0, 2))
    await eventually(lambda: len(reader.given) == 2)
    assert reader.given[0][1] - begin >= LEAD * 0.004
    await eventually(lambda: pacer._interval >= 0.008)
    count = 2 + 4 * CALM
    for offset in range(2, count, 2):
        pacer.put(_chunk(offset, 2))
    await eventually(lambda: pacer._interval == 0.004)
    pacer.put(Finished("length", RequestStats(1, 0, 0, 1.0, 0.1, 0.1)))
    await eventually(lambda: bool(reader.ended))
    chunks = [one for one, _ in reader.given if isinstance(one, Chunk)]
    assert [one.token_ids for one in chunks] == [(number,) for number in range(count)]
    assert "".join(one.text for one in chunks) == "ab" * (count // 2)
    last, end = reader.given[-2:]
    assert isinstance(end[0], Finished)
    assert end[1] - last[1] < 0.004, "it comes with the last token"
    assert pacer.held_bytes == 0


async def test_an_answer_of_no_tokens_ends_and_a_cancelled_one_gives_nothing() -> None:
    reader = _Reader()
    pacer = reader.pacer(0.001)
    pacer.put(Finished("stop", RequestStats(0, 0, 0, 0.0, 0.0, 0.0)))
    while not reader.ended:
        await asyncio.sleep(0.001)
    assert len(reader.given) == 1
    other = reader.pacer(0.001)
    other.put(_chunk(0, 5))
    other.cancel()
    await asyncio.sleep(0.05)
    assert len(reader.given) == 1
    assert reader.ended == [pacer, other]


async def test_each_token_has_its_log_probability(system: System) -> None:
    asked = replace(OPTIONS, max_tokens=20, logprobs=1)
    plain = [one async for one in system.client.stream(PROMPT, asked) if isinstance(one, Chunk)]
    steady = replace(asked, steady=True)
    chunks = [one async for one in system.client.stream(PROMPT, steady) if isinstance(one, Chunk)]
    assert all(len(one.logprobs) == 1 for one in chunks)
    assert [one.logprobs[0] for one in chunks] == [each for one in plain for each in one.logprobs]

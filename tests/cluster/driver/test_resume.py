"""A resumed request continues exactly where the caller's output ends, wherever that is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest
import pytest_asyncio

from paceline import Chunk, Completion, Finished, GenerateOptions, InvalidRequestError, Started
from paceline.generation import CompletionBuilder, GenerateEvent
from paceline.structure import Structure
from paceline.v1 import inference_pb2_grpc
from paceline.wire.requests import request_to_wire
from tests.cluster.system import Checkpoints, System, make_checkpoints, running_system

PROMPT = "The quick brown fox jumps"
MOST = 48
OPTIONS = GenerateOptions(temperature=1.0, seed=11, max_tokens=MOST, policy="chain", window=4)
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return make_checkpoints(tmp_path_factory.mktemp("resume"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(checkpoints: Checkpoints) -> AsyncIterator[System]:
    async with running_system(checkpoints, drafters={"d0": checkpoints.drafter}) as system:
        yield system


async def _unbroken(system: System, options: GenerateOptions) -> tuple[Completion, list[str]]:
    """The whole answer, and its text by token."""
    events = [event async for event in system.client.stream(PROMPT, options)]
    pieces = [piece for event in events if isinstance(event, Chunk) for piece in event.pieces]
    return CompletionBuilder().extend(events).build(), pieces


async def _rest(
    system: System, options: GenerateOptions, whole: Completion, count: int
) -> list[GenerateEvent]:
    """What follows the first `count` tokens."""
    resumed = replace(options, seed=whole.seed, resume=whole.token_ids[:count])
    return [event async for event in system.client.stream(whole.prompt_token_ids, resumed)]


def _joins(whole: Completion, pieces: Sequence[str], count: int, rest: list[GenerateEvent]) -> None:
    started, *chunks, finished = rest
    assert isinstance(started, Started)
    assert (started.seed, started.prompt_token_ids) == (whole.seed, whole.prompt_token_ids)
    token_ids, text = list(whole.token_ids[:count]), "".join(pieces[:count])
    for chunk in chunks:
        assert isinstance(chunk, Chunk)
        assert chunk.offset == len(token_ids)
        assert list(chunk.pieces) == list(pieces[chunk.offset :][: len(chunk.pieces)])
        token_ids += chunk.token_ids
        text += chunk.text
    assert (tuple(token_ids), text) == (whole.token_ids, whole.text)
    assert isinstance(finished, Finished)
    assert finished.reason == whole.finish_reason
    counts = finished.stats
    assert counts.steps * counts.acceptance_length == pytest.approx(len(whole.token_ids) - count)


CASES: dict[str, dict[str, Any]] = {
    "chain": {},
    "greedy tree": {"temperature": 0.0, "branches": 3},
    "tree": {"branches": 2, "policy": "fanout"},
    "plain, with penalties": {
        "policy": "off",
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
    },
    # Token 2 ends a sequence. It is likely, but no output has it before min_tokens.
    "end": {"logit_bias": {2: 4.0}, "min_tokens": 30},
    "auto": {"policy": "auto"},
}


@pytest.mark.parametrize("case", CASES)
async def test_it_joins_after_each_token(system: System, case: str) -> None:
    options = replace(OPTIONS, **CASES[case])
    whole, pieces = await _unbroken(system, options)
    assert whole.finish_reason == ("stop" if case == "end" else "length")
    assert len(whole.token_ids) >= 30
    assert "" in pieces  # A character spans tokens.
    counts = range(len(whole.token_ids) + 1)
    rests = await asyncio.gather(*(_rest(system, options, whole, count) for count in counts))
    for count, rest in zip(counts, rests, strict=True):
        _joins(whole, pieces, count, rest)
    assert not [event for event in rests[-1] if isinstance(event, Chunk)]


@pytest.mark.parametrize("length", [2, 5, 9])
async def test_a_stop_string_that_begins_before_the_break(system: System, length: int) -> None:
    """It spans tokens, so that a part of it is held back at some of the breaks."""
    plain, pieces = await _unbroken(system, OPTIONS)
    begin = plain.text.index("".join(pieces[20:])[:length])
    stop = plain.text[begin : begin + length]
    options = replace(OPTIONS, stop=[stop, "zzzzz"])
    whole, pieces = await _unbroken(system, options)
    assert whole.finish_reason == "stop"
    assert whole.text == plain.text[: plain.text.index(stop)]
    counts = range(len(whole.token_ids) + 1)
    rests = await asyncio.gather(*(_rest(system, options, whole, count) for count in counts))
    for count, rest in zip(counts, rests, strict=True):
        _joins(whole, pieces, count, rest)


async def test_what_has_ended_is_not_decoded(system: System) -> None:
    whole, _ = await _unbroken(system, OPTIONS)
    steps = system.driver.stats().steps
    rest = await _rest(system, OPTIONS, whole, MOST)
    assert [type(event) for event in rest] == [Started, Finished]
    assert system.driver.stats().steps == steps
    await system.settle()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"resume": [384]}, "resume: token id 384 is not in the vocabulary of 384"),
        ({"resume": [5] * (MOST + 1)}, f"resume: the output ends after {MOST} tokens, got 49"),
        ({"resume": [5, 2, 5]}, "resume: the output ends after 2 tokens, got 3"),
        ({"resume": [5], "seed": None}, "resume: expected the seed of the stream that it resumes"),
        ({"resume": [-1]}, "resume: expected a list of token ids"),
    ],
)
async def test_output_that_cannot_be_is_refused(
    system: System, wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        await system.client.generate(PROMPT, replace(OPTIONS, **wrong))


async def test_a_stop_string_in_the_middle_of_the_resumed_output_is_refused(
    system: System,
) -> None:
    plain, pieces = await _unbroken(system, OPTIONS)
    stop = next(piece for piece in pieces if piece)
    with pytest.raises(InvalidRequestError, match="resume: the output ends after "):
        await _rest(system, replace(OPTIONS, stop=[stop]), plain, MOST)


@pytest.mark.parametrize("policy", ["chain", "off"])
async def test_a_structure_goes_on_after_each_token(system: System, policy: str) -> None:
    structure = Structure.regex(r"[a-c]{12}(xyz|yz){4}-[0-9]+!")
    options = replace(OPTIONS, structure=structure, policy=policy)
    whole, pieces = await _unbroken(system, options)
    counts = range(len(whole.token_ids) + 1)
    rests = await asyncio.gather(*(_rest(system, options, whole, count) for count in counts))
    for count, rest in zip(counts, rests, strict=True):
        _joins(whole, pieces, count, rest)
    with pytest.raises(InvalidRequestError, match="resume: the structure refuses token"):
        await system.client.generate(PROMPT, replace(options, resume=whole.token_ids[1:2] * 20))


@pytest.mark.timing
async def test_a_deadline_that_passed_cancels_the_sequence(system: System) -> None:
    """Of a caller that only sets gRPC's own deadline, and does nothing when it has passed."""
    options = replace(OPTIONS, max_tokens=None, ignore_eos=True, policy="off")
    stub: Any = inference_pb2_grpc.InferenceServiceStub(system.client._channel)
    before = system.driver.stats()
    call = stub.Generate(request_to_wire(PROMPT, options), timeout=0.1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await system.settle()
    after = system.driver.stats()
    assert 0 < after.committed_tokens - before.committed_tokens < 480
    await asyncio.sleep(0.05)
    assert system.driver.stats().steps == after.steps

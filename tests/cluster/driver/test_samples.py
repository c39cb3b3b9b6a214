"""Several samples of a request: each is a sequence of its own, and all come in one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from cluster.driver.generation import MAX_UNREAD_BYTES, Sample
from paceline import (
    Chunk,
    Client,
    Completion,
    Finished,
    GenerateEvent,
    GenerateOptions,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    Started,
)
from paceline.generation import CompletionBuilder
from paceline.structure import Structure
from paceline.v1 import inference_pb2_grpc
from paceline.wire.answers import event_to_wire
from paceline.wire.requests import request_to_wire
from tests.cluster.system import Checkpoints, System, eventually, make_checkpoints, running_system

PROMPT = "The quick brown fox jumps"
NUM = 3
OPTIONS = GenerateOptions(temperature=1.0, seed=11, max_tokens=40, policy="lockstep", window=4)
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return make_checkpoints(tmp_path_factory.mktemp("samples"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(checkpoints: Checkpoints) -> AsyncIterator[System]:
    async with running_system(checkpoints, drafters={"d0": checkpoints.drafter}) as system:
        yield system


async def _samples(
    system: System, options: GenerateOptions, count: int = NUM
) -> tuple[Completion, ...]:
    return await system.client.generate(PROMPT, options, samples=count)


def _told(one: Completion) -> tuple[object, ...]:
    return one.token_ids, one.text, one.finish_reason, one.seed, one.prompt_token_ids, one.logprobs


CASES: dict[str, dict[str, Any]] = {
    "chain": {},
    "tree": {"branches": 2},
    "without waiting": {"policy": "chain"},
    "auto": {"policy": "auto"},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.5},
    # Token 2 ends a sequence. It is likely, but no output has it before min_tokens.
    "ends": {"logit_bias": {2: 4.0}, "min_tokens": 20},
    "bad words": {"bad_words": [*"aeiou", "th", "he"]},
    "logprobs": {"logprobs": 2},
    "structure": {"structure": Structure.regex(r"[a-c]{12}(xyz|yz){4}-[0-9]+!")},
}


@pytest.mark.parametrize("case", CASES)
async def test_each_is_plain_decoding_s(system: System, case: str) -> None:
    options = replace(OPTIONS, **CASES[case])
    drafted = await _samples(system, options)
    plain = await _samples(system, replace(options, policy="off", branches=None))
    assert [*map(_told, drafted)] == [*map(_told, plain)]
    assert len({one.token_ids for one in drafted}) == NUM
    assert drafted[0].request_id == drafted[1].request_id
    if options.policy == "lockstep":
        assert all(one.stats.accepted > 0 for one in drafted)
    alone = await system.client.generate(PROMPT, options)
    assert _told(drafted[0]) == _told(alone)
    await system.settle()


async def test_their_number_changes_none_of_them(system: System) -> None:
    few, many = await _samples(system, OPTIONS, 2), await _samples(system, OPTIONS, 5)
    assert [*map(_told, few)] == [*map(_told, many)][:2]
    with Client(system.server.address) as client:
        calls = [asyncio.to_thread(client.generate, PROMPT, OPTIONS, samples=n) for n in (1, 2)]
        one, two = await asyncio.gather(*calls)
    assert [*map(_told, two)] == [*map(_told, few)]
    assert [*map(_told, one)] == [*map(_told, few)][:1]


async def test_the_greedy_choice_has_no_noise(system: System) -> None:
    completions = await _samples(system, replace(OPTIONS, temperature=0.0))
    assert len({one.token_ids for one in completions}) == 1


async def test_a_stop_string_ends_only_the_sample_that_has_it(system: System) -> None:
    plain = await _samples(system, OPTIONS)
    stop = plain[1].text[10:14]
    assert stop not in plain[0].text
    assert stop not in plain[2].text
    stopped = await _samples(system, replace(OPTIONS, stop=[stop]))
    assert [_told(stopped[0]), _told(stopped[2])] == [_told(plain[0]), _told(plain[2])]
    assert stopped[1].finish_reason == "stop"
    assert stopped[1].text == plain[1].text[: plain[1].text.index(stop)]


async def _events(
    system: System, options: GenerateOptions, prompt: Any = PROMPT
) -> list[GenerateEvent]:
    return [event async for event in system.client.stream(prompt, options)]


async def test_what_a_stream_holds(system: System) -> None:
    events = await _events(system, replace(OPTIONS, samples=NUM, prompt_logprobs=1))
    assert [type(event) for event in events].count(Started) == 1
    assert isinstance(events[0], Started)
    first_output = next(i for i, one in enumerate(events) if isinstance(one, Chunk) and one.text)
    of_prompt = [one for one in events if isinstance(one, Chunk) and one.prompt_logprobs]
    assert events[1 : 1 + len(of_prompt)] == of_prompt
    assert first_output > len(of_prompt) > 0
    assert sum(len(one.prompt_logprobs) for one in of_prompt) == len(events[0].prompt_token_ids)
    ended = [event.sample for event in events if isinstance(event, Finished)]
    assert sorted(ended) == [0, 1, 2]
    assert isinstance(events[-1], Finished)
    builder = CompletionBuilder(NUM).extend(events)
    assert len({one.prompt_logprobs for one in builder.build_all()}) == 1
    without = await _samples(system, OPTIONS)
    assert [one.token_ids for one in builder.build_all()] == [one.token_ids for one in without]
    await system.settle()


async def test_steady_chunks_have_one_token_and_equal_sizes(system: System) -> None:
    events = await _events(system, replace(OPTIONS, samples=NUM, steady=True, max_tokens=20))
    chunks = [event for event in events if isinstance(event, Chunk)]
    assert all(len(one.token_ids) == 1 for one in chunks)
    sizes = {event_to_wire(replace(one, padded=True)).chunk.ByteSize() for one in chunks}
    assert sizes == {128}
    without = await _samples(system, replace(OPTIONS, max_tokens=20))
    told = [[*one.token_ids] for one in without]
    got = [[i for one in chunks if one.sample == n for i in one.token_ids] for n in range(NUM)]
    assert got == told


@pytest.mark.parametrize("case", ["chain", "ends", "structure"])
async def test_it_joins_wherever_its_samples_broke_off(system: System, case: str) -> None:
    options = replace(OPTIONS, samples=NUM, **CASES[case])
    whole = CompletionBuilder(NUM).extend(await _events(system, options)).build_all()
    longest = max(len(one.token_ids) for one in whole)
    for counts in ((0, 0, 7), (5, 0, 1), (longest, 3, 9), (longest,) * 3, (1, longest)):
        resumed = [one.token_ids[:count] for one, count in zip(whole, counts, strict=False)]
        asked = replace(options, resume_samples=resumed)
        rest = await _events(system, asked, whole[0].prompt_token_ids)
        had = [*map(len, resumed), 0][:NUM]
        for number, one in enumerate(whole):
            chunks = [e for e in rest if isinstance(e, Chunk) and e.sample == number]
            got = [token_id for chunk in chunks for token_id in chunk.token_ids]
            assert tuple(got) == one.token_ids[had[number] :], (counts, number)
            ends = [e for e in rest if isinstance(e, Finished) and e.sample == number]
            assert [end.reason for end in ends] == [one.finish_reason]
            assert one.text.endswith("".join(chunk.text for chunk in chunks))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"samples": 0}, "samples: expected an integer from 1 to 128, got 0"),
        ({"samples": 129}, "samples: expected an integer from 1 to 128, got 129"),
        ({"samples": 2, "resume": [5]}, "resume: expected resume_samples in its place"),
        ({"samples": 2, "resume_samples": [[5]] * 3}, "resume_samples: expected at most 2 samples"),
        ({"resume_samples": [[5], [5]]}, "resume_samples: expected at most 1 samples, got 2"),
        ({"samples": 2, "resume_samples": [[384]]}, "resume_samples: token id 384 is not in"),
        ({"samples": 2, "resume_samples": [[5]], "seed": None}, "resume_samples: expected the se"),
        ({"samples": 2, "resume_samples": [[], [5] * 41]}, "resume_samples: the output ends after"),
        ({"samples": 2, "resume_samples": 5}, "resume_samples: expected for each sample a list"),
    ],
)
async def test_what_cannot_be_is_refused(system: System, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        await _events(system, replace(OPTIONS, **wrong))


async def test_whole_answers_are_asked_for_by_keyword(system: System) -> None:
    with pytest.raises(InvalidRequestError, match="samples: expected as a keyword of `generate`"):
        await system.client.generate(PROMPT, replace(OPTIONS, samples=2))
    two: Any = "two"
    with pytest.raises(InvalidRequestError, match="samples: expected an integer, got 'two'"):
        await system.client.generate(PROMPT, OPTIONS, samples=two)


async def test_cancelling_ends_all_of_them(system: System) -> None:
    long = replace(OPTIONS, max_tokens=400, ignore_eos=True, samples=NUM, policy="off")
    stub: Any = inference_pb2_grpc.InferenceServiceStub(system.client._channel)
    call = stub.Generate(request_to_wire(PROMPT, long))
    seen = set()
    async for response in call:
        if response.HasField("chunk"):
            seen.add(response.sample)
        if len(seen) == NUM:
            assert system.driver.stats().sequences_running == NUM
            break
    call.cancel()
    await system.settle()
    assert system.driver.stats().sequences_running == 0


async def test_an_unread_answer_pauses_all_of_them(system: System) -> None:
    """The bound is of the request, however many samples it has. No sample runs on."""
    options = replace(OPTIONS, max_tokens=450, ignore_eos=True, samples=6, logprobs=8)
    generation = await system.driver.submit(PROMPT, options)
    scheduler = system.driver.scheduler
    await eventually(lambda: not scheduler.num_running)
    before = system.driver.stats().committed_tokens
    await asyncio.sleep(0.1)
    assert system.driver.stats().committed_tokens == before
    unread = sum(size for _, size in generation.unread)
    assert 6 * MAX_UNREAD_BYTES < unread < 8 * MAX_UNREAD_BYTES
    completions = CompletionBuilder(6)
    async for event in generation:
        completions.add(event)
    assert [len(one.token_ids) for one in completions.build_all()] == [450] * 6
    await system.settle()


async def test_a_defect_in_one_ends_all_of_them(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    emit = Sample.emit

    def breaks(sample: Sample, *given: Any) -> None:
        if sample.number == 1:
            raise RuntimeError("broken")
        emit(sample, *given)

    monkeypatch.setattr(Sample, "emit", breaks)
    long = replace(OPTIONS, max_tokens=400, ignore_eos=True)
    with pytest.raises(InternalError, match="an unexpected error ended request"):
        await _samples(system, long)
    await system.settle()


async def test_they_count_where_places_are_counted(checkpoints: Checkpoints) -> None:
    async with running_system(checkpoints, max_num_seqs=2, max_waiting=4) as system:
        wanted = replace(OPTIONS, policy="off", max_tokens=200, ignore_eos=True)
        with pytest.raises(InvalidRequestError, match="samples: expected at most 6 sequences"):
            await _samples(system, wanted, 7)
        running = asyncio.create_task(_samples(system, wanted, 5))
        await eventually(lambda: system.driver.scheduler.num_waiting == 3)
        with pytest.raises(OverloadedError, match="4 requests are waiting"):
            await system.client.generate(PROMPT, wanted, samples=2)
        assert [len(one.token_ids) for one in await running] == [200] * 5
        await system.settle()

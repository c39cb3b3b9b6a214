"""Requests that share one GenerateMany stream, against a real driver."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import grpc
import pytest
import pytest_asyncio

from cluster.driver import many_requests
from cluster.driver.driver import Driver
from cluster.driver.generation import Generation
from paceline import (
    AsyncClient,
    Client,
    Completion,
    DeadlineError,
    GenerateInput,
    GenerateOptions,
    InternalError,
    InvalidRequestError,
    Message,
    PromptTooLongError,
)
from paceline.channel import MAX_MESSAGE_BYTES
from paceline.limits import MAX_PROMPT_BYTES
from paceline.v1 import inference_pb2, inference_pb2_grpc
from paceline.wire.requests import request_to_wire
from tests.cluster.system import (
    Checkpoints,
    System,
    eventually,
    make_checkpoints,
    running_system,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPTS = ("The quick brown fox", "def add(left", "Übung macht den Meister", "sea sea sea")
LONG = GenerateOptions(temperature=0.0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return make_checkpoints(tmp_path_factory.mktemp("many"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(checkpoints: Checkpoints) -> AsyncIterator[System]:
    async with running_system(checkpoints, drafters={"d": None}) as system:
        yield system


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def slow(checkpoints: Checkpoints) -> AsyncIterator[System]:
    """A system in which LONG takes two seconds, so that several requests surely run at once."""
    async with running_system(checkpoints, target_rtt_ms=10) as system:
        yield system


@pytest.fixture
def stub(system: System) -> inference_pb2_grpc.InferenceServiceAsyncStub:
    return _stub_of(system)


def _stub_of(system: System) -> inference_pb2_grpc.InferenceServiceAsyncStub:
    channel = grpc.aio.insecure_channel(system.server.address)
    return inference_pb2_grpc.InferenceServiceStub(channel)


def _begin(
    number: int, prompt: GenerateInput = PROMPTS[0], options: GenerateOptions = LONG
) -> inference_pb2.GenerateManyRequest:
    return inference_pb2.GenerateManyRequest(number=number, begin=request_to_wire(prompt, options))


async def test_each_gets_what_a_call_of_its_own_gives(system: System) -> None:
    options = GenerateOptions(seed=3, max_tokens=40, temperature=1.0, stop=("zz",))
    with Client(system.server.address) as own:
        expected = [await asyncio.to_thread(own.generate, prompt, options) for prompt in PROMPTS]
    got = await asyncio.gather(*(system.client.generate(p, options) for p in PROMPTS))
    for one, other in zip(expected, got, strict=True):
        assert (one.token_ids, one.text) == (other.token_ids, other.text)
        assert (one.finish_reason, one.seed) == (other.finish_reason, other.seed)
    await system.settle()


async def test_what_a_step_gives_to_several_comes_in_one_message(
    stub: inference_pb2_grpc.InferenceServiceAsyncStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, all_here = Driver.submit, asyncio.Barrier(8)

    async def together(
        driver: Driver, prompt: GenerateInput, options: GenerateOptions
    ) -> Generation:
        await all_here.wait()
        return await submit(driver, prompt, options)

    monkeypatch.setattr(Driver, "submit", together)
    call: Any = stub.GenerateMany(None)
    for number in range(8):
        await call.write(_begin(number))
    messages = answers = finished = 0
    async for message in call:
        messages += 1
        answers += len(message.responses)
        finished += sum(answer.response.HasField("finished") for answer in message.responses)
        if finished == 8:
            break
    call.cancel()
    assert messages < answers / 3


async def test_an_error_of_one_is_its_own(system: System) -> None:
    good = asyncio.create_task(system.client.generate(PROMPTS[0], LONG))
    with pytest.raises(InvalidRequestError, match="temperature") as caught:
        await system.client.generate(PROMPTS[1], temperature=-1.0)
    assert caught.value.field == "temperature"
    assert len((await good).token_ids) == 200
    await system.settle()


@pytest.mark.parametrize("timeout", [None, 60.0], ids=["GenerateMany", "Generate"])
async def test_a_defect_is_told_by_its_id_alone_and_leaves_the_others(
    system: System,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    timeout: float | None,
) -> None:
    """Each request gets an answer: a caller on a stream has no other way to learn of a defect."""
    submit = Driver.submit

    async def breaks_at_the_second(
        driver: Driver, prompt: GenerateInput, options: GenerateOptions
    ) -> Generation:
        if prompt == PROMPTS[1]:
            raise RuntimeError("another caller's secret")
        return await submit(driver, prompt, options)

    monkeypatch.setattr(Driver, "submit", breaks_at_the_second)
    async with (
        asyncio.timeout(120),
        AsyncClient(system.server.address, timeout=timeout) as client,
    ):
        asked = [
            client.generate(prompt, LONG, request_id=f"request {number}")
            for number, prompt in enumerate(PROMPTS)
        ]
        answers = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(answers[1], InternalError)
    assert "'request 1'" in str(answers[1])
    assert "secret" not in str(answers[1])
    assert "RuntimeError" not in str(answers[1])
    (record,) = [one for one in caplog.records if "request 1:" in one.getMessage()]
    assert record.exc_info
    assert "secret" in str(record.exc_info[1])
    assert sum(isinstance(answer, Completion) for answer in answers) == len(PROMPTS) - 1


async def test_cancelling_one_leaves_the_others(slow: System) -> None:
    before = slow.driver.stats().committed_tokens
    good = asyncio.create_task(slow.client.generate(PROMPTS[0], LONG))
    leaving = [asyncio.create_task(slow.client.generate(p, LONG)) for p in PROMPTS[1:]]
    await eventually(lambda: slow.driver.scheduler.num_running == 4)
    for task in leaving:
        task.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    await eventually(lambda: slow.driver.scheduler.num_running <= 1)
    assert len((await good).token_ids) == 200
    await slow.settle()
    assert slow.driver.stats().committed_tokens - before < 3 * 200


@pytest.mark.timing
@pytest.mark.parametrize("shared", [True, False])
async def test_a_timeout_cancels_within_a_step_and_leaves_the_others(
    slow: System, *, shared: bool
) -> None:
    alone = await slow.client.generate(PROMPTS[0], LONG)
    bystander = asyncio.create_task(slow.client.generate(PROMPTS[0], LONG))
    await eventually(lambda: slow.driver.scheduler.num_running == 1)
    before = slow.driver.stats().committed_tokens
    with Client(slow.server.address) as own:
        if shared:
            asked = slow.client.generate(PROMPTS[1], LONG, timeout=0.3)
        else:
            asked = asyncio.to_thread(own.generate, PROMPTS[1], LONG, timeout=0.3)
        with pytest.raises(DeadlineError, match=r"timeout of 0\.3 s"):
            await asked
    await eventually(lambda: slow.driver.scheduler.num_running <= 1)
    assert (await bystander).token_ids == alone.token_ids
    await slow.settle()
    assert slow.driver.stats().committed_tokens - before < 200 + 100, "it was decoded on"


async def test_the_end_of_the_stream_cancels_all(slow: System) -> None:
    before = slow.driver.stats().committed_tokens
    for half_close in (True, False):
        call = _stub_of(slow).GenerateMany(None)
        for number in (1, 2):
            await call.write(_begin(number))
        await eventually(lambda: slow.driver.scheduler.num_running == 2)
        await call.done_writing() if half_close else call.cancel()
        await slow.settle()
    assert slow.driver.stats().committed_tokens - before < 2 * 200


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ((_begin(5), _begin(5)), "number: request number 5 is already in use on this stream"),
        ((inference_pb2.GenerateManyRequest(number=1),), "message: expected begin or cancel"),
    ],
)
async def test_a_message_that_makes_no_sense_ends_the_stream(
    system: System,
    stub: inference_pb2_grpc.InferenceServiceAsyncStub,
    messages: tuple[inference_pb2.GenerateManyRequest, ...],
    reason: str,
) -> None:
    call = stub.GenerateMany(None)
    for message in messages:
        await call.write(message)
    with pytest.raises(grpc.aio.AioRpcError, match=reason) as caught:
        async for _ in call:
            pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await system.settle()


@pytest.mark.parametrize("sensible", [True, False])
async def test_an_end_waits_for_the_answer_that_is_under_way(
    system: System, *, sensible: bool
) -> None:
    """gRPC sends no status while the first message is being written, so the caller would never
    know.
    """
    narrow = [("grpc.http2.lookahead_bytes", 16), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(system.server.address, options=narrow) as channel:
        call: Any = inference_pb2_grpc.InferenceServiceStub(channel).GenerateMany(None)
        # The first answer repeats the prompt, which exceeds the flow-control window until we read.
        await call.write(_begin(1, [300] * 300))
        await eventually(lambda: system.driver.scheduler.num_running == 1)
        if sensible:
            await call.done_writing()
        else:
            await call.write(inference_pb2.GenerateManyRequest(number=1))
        await system.settle()
        async with asyncio.timeout(60):
            code = await _code_of(call)
    assert code is (grpc.StatusCode.OK if sensible else grpc.StatusCode.INVALID_ARGUMENT)


async def _code_of(call: Any) -> grpc.StatusCode:
    """The status with which a stream ends that is read to its end."""
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_cancelling_what_does_not_run_is_no_error_and_a_number_may_be_used_again(
    stub: inference_pb2_grpc.InferenceServiceAsyncStub,
) -> None:
    call = stub.GenerateMany(None)
    short = GenerateOptions(max_tokens=2, ignore_eos=True)
    cancel = inference_pb2.GenerateManyRequest(number=7, cancel=inference_pb2.CancelRequest())
    for _ in range(2):
        await call.write(cancel)
        await call.write(_begin(7, options=short))
        finished = False
        while not finished:
            message: Any = await call.read()
            finished = any(answer.response.HasField("finished") for answer in message.responses)
    call.cancel()


async def _beside(system: System, asked: Awaitable[object]) -> BaseException | object:
    """The answer to a request while another one runs on its stream and goes on to its end."""
    good = asyncio.create_task(system.client.generate(PROMPTS[0], LONG))
    await eventually(lambda: system.driver.scheduler.num_running == 1)
    stream = system.client._shared
    (result,) = await asyncio.gather(asked, return_exceptions=True)
    assert len((await good).token_ids) == 200
    assert system.client._shared is stream, "the stream broke"
    await system.settle()
    return result


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("a" * MAX_MESSAGE_BYTES, LONG, "prompt"),
        ([200] * MAX_MESSAGE_BYTES, LONG, "prompt_token_ids"),
        ([Message("user", "Ü" * (MAX_MESSAGE_BYTES // 2))], LONG, "messages"),
        ("a", GenerateOptions(stop=("x" * MAX_MESSAGE_BYTES,)), "stop"),
    ],
)
async def test_a_request_beyond_a_message_is_refused_before_it_is_sent(
    system: System, prompt: GenerateInput, options: GenerateOptions, field: str
) -> None:
    refused = await _beside(system, system.client.generate(prompt, options))
    assert isinstance(refused, InvalidRequestError)
    assert refused.field == field
    assert "expected at most" in str(refused)


async def test_the_largest_request_that_is_sent_is_answered(system: System) -> None:
    """A request that the client lets through does not end the stream at the server."""
    text = "a" * MAX_PROMPT_BYTES
    refused = await _beside(system, system.client.generate(text, max_tokens=1))
    assert isinstance(refused, PromptTooLongError)
    assert "characters, which cannot fit into" in str(refused)


async def test_an_error_that_quotes_something_long_is_cut(system: System) -> None:
    """Uncut, it would end a shared stream by a message, a call by a header that gRPC refuses."""
    wrong = [Message("Ü" * 4_000_000, "a")]
    with Client(system.server.address) as client:
        own = asyncio.to_thread(client.generate, wrong)
        for asked in (own, system.client.generate(wrong)):
            refused = await _beside(system, asked)
            assert isinstance(refused, InvalidRequestError)
            assert re.search(r"a role of .*, got 'Ü{150,200}", str(refused))
            assert len(str(refused)) < 1000


async def test_an_answer_beyond_a_message_fails_its_request_alone(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A context long enough for the real limit does not fit here.
    monkeypatch.setattr(many_requests, "MAX_REQUEST_BYTES", 600)
    refused = await _beside(system, system.client.generate([300] * 400, max_tokens=2))
    assert isinstance(refused, PromptTooLongError)
    assert "an answer may have 600 bytes on the wire, this one has 8" in str(refused)
    assert await _beside(system, system.client.generate([300] * 200, max_tokens=2))


async def test_long_messages_are_cut(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_requests, "USUAL_BYTES", 1)
    answers = await asyncio.gather(*(system.client.generate(p, LONG) for p in PROMPTS))
    assert all(len(answer.token_ids) == 200 for answer in answers)

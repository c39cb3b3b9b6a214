"""Defects of the driver itself: which requests end, and that no exception goes unheard."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import grpc
import pytest

from cluster.decoding.events import StepDone
from cluster.driver import drafter_links, many_requests, target_links
from cluster.driver.round_tap import RoundTap
from cluster.driver.stop_strings import StopStrings
from cluster.driver.text import TextStream
from cluster.driver.worker_messages import drafts_to_wire, step_messages
from paceline import Completion, GenerateOptions
from paceline.errors import InternalError, PacelineError
from paceline.generation import Chunk
from paceline.v1 import trace_pb2, trace_pb2_grpc
from paceline.wire.answers import fill_response
from tests.cluster.interruptions import OPTIONS, PROMPT, plain_answer
from tests.cluster.system import (
    Checkpoints,
    System,
    eventually,
    make_checkpoints,
    running_system,
)
from tests.workers.grpc_peers import END

STOP = "no text ever has this"
"""Marks the request that meets the defect."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return make_checkpoints(tmp_path_factory.mktemp("defects"))


def _break(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Make a method of one request's text raise at its 20th token."""
    right = getattr(TextStream, method)
    begin = TextStream.__init__
    seen: dict[TextStream, int] = {}

    def init(text: TextStream, codec: Any, *, stop: StopStrings, **others: Any) -> None:
        begin(text, codec, stop=stop, **others)
        if STOP in stop.strings:
            seen[text] = 0

    def broken(text: TextStream, token_ids: Sequence[int], **others: Any) -> Any:
        if text in seen:
            seen[text] += len(token_ids)
            if seen[text] > 20:
                raise ZeroDivisionError("injected")
        return right(text, token_ids, **others)

    monkeypatch.setattr(TextStream, "__init__", init)
    monkeypatch.setattr(TextStream, method, broken)


@pytest.mark.parametrize("method", ["take", "first_stop"])
@pytest.mark.parametrize("timeout", [None, 120.0])
async def test_a_defect_in_one_requests_text_ends_that_request(
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
    timeout: float | None,
) -> None:
    """`timeout`: of the client. With a timeout, each request is a call of its own."""
    _break(monkeypatch, method)
    async with running_system(
        checkpoints, drafters={"d": checkpoints.drafter}, target_rtt_ms=10
    ) as system:
        client = system.client
        plain = await plain_answer(system)
        bystanders = [asyncio.create_task(client.generate(PROMPT, OPTIONS)) for _ in range(2)]
        await eventually(lambda: system.driver.scheduler.num_running == 2)
        with pytest.raises(InternalError, match="ended request 'the-victim'"):
            await client.generate(PROMPT, OPTIONS, stop=[STOP], request_id="the-victim")
        for one in await asyncio.gather(*bystanders):
            assert (one.token_ids, one.text) == (plain.token_ids, plain.text)
        assert system.driver.is_serving
        await system.settle()
    assert any("the-victim" in one.getMessage() for one in caplog.records)


async def test_a_defect_in_wording_one_answer_ends_its_request(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All other requests on the stream go on."""
    broken: list[Chunk] = []

    def broken_once(response: Any, answer: Any) -> None:
        if isinstance(answer, Chunk) and answer.offset > 20 and not broken:
            broken.append(answer)
            raise ZeroDivisionError("injected")
        fill_response(response, answer)

    async with running_system(checkpoints, target_rtt_ms=10) as system:
        plain = await plain_answer(system)
        asked = [asyncio.create_task(system.client.generate(PROMPT, OPTIONS)) for _ in range(3)]
        await eventually(lambda: system.driver.scheduler.num_running == 3)
        monkeypatch.setattr(many_requests, "fill_response", broken_once)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        (failed,) = [one for one in answers if isinstance(one, BaseException)]
        assert isinstance(failed, InternalError)
        right_ones = [one for one in answers if isinstance(one, Completion)]
        assert [one.text for one in right_ones] == [plain.text] * 2
        await system.settle()


def _break_steps(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the scheduler fail half-way through an answer of the target."""
    right = system.driver.scheduler.steps_for

    def steps_for(event: Any) -> Any:
        steps = right(event)
        if isinstance(event, StepDone) and event.step > 20:
            raise ZeroDivisionError("injected")
        return steps

    monkeypatch.setattr(system.driver.scheduler, "steps_for", steps_for)


def _break_messages(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    right = system.driver.scheduler.messages

    def messages() -> Any:
        if system.driver.scheduler.totals.steps > 20:
            raise ZeroDivisionError("injected")
        return right()

    monkeypatch.setattr(system.driver.scheduler, "messages", messages)


@pytest.mark.parametrize("inject", [_break_steps, _break_messages])
async def test_a_defect_in_the_scheduler_ends_all_requests_and_the_server(
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    inject: Callable[[System, pytest.MonkeyPatch], None],
) -> None:
    """The controller sees the server's end and restarts the driver (placement/lives.py)."""
    async with running_system(
        checkpoints, drafters={"d": checkpoints.drafter}, max_num_seqs=2, target_rtt_ms=5
    ) as system:
        inject(system, monkeypatch)
        asked = [system.client.generate(PROMPT, OPTIONS, policy="off") for _ in range(4)]
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*asked, return_exceptions=True)
            await system.server.wait()
        assert [type(one) for one in answers] == [InternalError] * 4
        assert "a defect ended the server while it worked" in str(answers[0])
        assert not system.driver.is_serving
        with pytest.raises(InternalError):
            await system.driver.submit(PROMPT, OPTIONS)
    (record,) = [one for one in caplog.records if one.levelno == logging.CRITICAL]
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ZeroDivisionError)


async def test_a_defect_in_a_trace_ends_the_trace(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = RoundTap.step_answered

    def broken(tap: RoundTap, group: int, response: Any, answered_at: float) -> None:
        if response.step > 20:
            raise ZeroDivisionError("injected")
        right(tap, group, response, answered_at)

    monkeypatch.setattr(RoundTap, "step_answered", broken)
    async with (
        running_system(checkpoints, target_rtt_ms=5) as system,
        grpc.aio.insecure_channel(system.server.address) as channel,
    ):
        call: Any = trace_pb2_grpc.TraceServiceStub(channel).Trace(trace_pb2.TraceRequest())
        assert (await call.read()).HasField("begun")
        plain = await plain_answer(system)
        assert len(plain.token_ids) == 120
        with suppress(grpc.aio.AioRpcError):
            while await call.read() is not END:
                pass
        assert await call.code() == grpc.StatusCode.INTERNAL
        assert "a defect ended the trace" in await call.details()
        assert (await system.client.generate(PROMPT, OPTIONS)).token_ids == plain.token_ids


async def test_a_message_to_a_drafter_that_cannot_be_worded_begins_its_stream_anew(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No text changes, and the drafter drafts again."""
    async with running_system(
        checkpoints, drafters={"d": checkpoints.drafter}, target_rtt_ms=10
    ) as system:
        plain = await plain_answer(system)
        bystander = asyncio.create_task(system.client.generate(PROMPT, OPTIONS))
        await eventually(lambda: system.driver.scheduler.totals.counts.accepted > 0)
        broken: list[Any] = []

        def broken_once(instructions: Any) -> Any:
            if not broken:
                broken.append(instructions)
                raise ZeroDivisionError("injected")
            return drafts_to_wire(instructions)

        monkeypatch.setattr(drafter_links, "drafts_to_wire", broken_once)
        assert (await bystander).token_ids == plain.token_ids
        await eventually(lambda: "d" in system.connected())
        drafter = next(one for one in system.driver.stats().workers if one.name == "d")
        assert drafter.reconnects >= 1
        again = await system.client.generate(PROMPT, OPTIONS)
        assert again.stats.accepted > 0
        assert again.token_ids == plain.token_ids


async def test_a_step_that_cannot_be_worded_counts_as_lost(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver does not end: the request is tried again, and refused if that fails too."""
    async with running_system(checkpoints) as system:

        def broken_at_666(step: Any) -> Any:
            if any(one.spec.seed == 666 for one in step.open):
                raise ZeroDivisionError("injected")
            return step_messages(step)

        monkeypatch.setattr(target_links, "step_messages", broken_at_666)
        with pytest.raises(PacelineError):
            await system.client.generate(PROMPT, GenerateOptions(seed=666, max_tokens=5))
        await eventually(lambda: system.driver.is_serving)
        assert len((await plain_answer(system)).token_ids) == 120

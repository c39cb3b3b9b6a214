"""The client against a small server: what it sends, what it raises, what closing does."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any, get_type_hints

import grpc
import pytest

from paceline import (
    AsyncClient,
    Chat,
    Client,
    GenerateEvent,
    GenerateOptions,
    InternalError,
    InvalidRequestError,
    Message,
    OverloadedError,
    PacelineError,
    PromptTooLongError,
    ProtocolError,
    UnavailableError,
    WorkerLostError,
    WrongServerError,
)
from paceline.options import OptionFields
from paceline.status import error_told
from paceline.wire.requests import request_from_wire
from tests.paceline.scripted import DESCRIPTION, EVENTS, STATS, Scripted

pytestmark = pytest.mark.usefixtures("sent_once")

TIMEOUTS = (120.0, None)
"""Timeouts of a client whose requests end earlier. Both behave the same."""


def test_a_completion(address: str, scripted: Scripted) -> None:
    options = GenerateOptions(
        temperature=0.5, seed=3, stop=["x"], policy="chain", window=4, rule="mcsd",
        stopping="adaedl", branches=2, drafter="model", tenant="ours",
    )  # fmt: skip
    with Client(address) as client:
        completion = client.generate([Message("user", "hello")], options)
        assert tuple(client.stream([5, 6])) == EVENTS
    assert completion.text == "hé!"
    assert completion.token_ids == (7, 8, 9)
    assert completion.origins == ("draft", "target", "target")
    assert (completion.seed, completion.request_id) == (2**64 - 1, "mine")
    assert (completion.finish_reason, completion.prompt_token_ids) == ("stop", (5, 6))
    assert completion.stats == EVENTS[-1].stats
    drafting = completion.stats.speculation
    assert (drafting.acceptance, drafting.acceptance_at) == (3 / 6, (2 / 4, 1 / 2))
    assert (drafting.used_share, drafting.hit_rate) == (4 / 9, None)
    chat, sent = request_from_wire(scripted.requests[0])
    assert chat == Chat((Message("user", "hello"),))
    assert (sent.temperature, sent.seed, sent.stop) == (0.5, 3, ("x",))
    assert (sent.policy, sent.window, sent.top_k) == ("chain", 4, None)
    assert (sent.rule, sent.stopping, sent.branches) == ("mcsd", "adaedl", 2)
    assert (sent.drafter, sent.tenant) == ("model", "ours")
    assert request_from_wire(scripted.requests[1])[0] == (5, 6)


def test_a_chat_as_other_clients_write_it(address: str, scripted: Scripted) -> None:
    with Client(address) as client:
        parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
        mixed: list[Message | Mapping[str, object]] = [
            {"role": "system", "content": parts},
            Message("user", "hello"),
        ]
        client.generate(mixed)
    chat, _ = request_from_wire(scripted.requests[0])
    assert chat == Chat((Message("system", "Be brief."), Message("user", "hello")))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([{"role": "user"}], "messages: a message has a role and a content, got role"),
        ([{"role": "user", "content": 5}], "messages: expected a content of text or .*, got int"),
        (
            [{"role": "user", "content": []}],
            "messages: expected a content of .*, got an empty list",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages: expected content parts of type 'text', got one of type 'image_url'",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": None}]}],
            "messages: expected a text part with a text, got NoneType",
        ),
        ({"role": "user", "content": "x"}, "prompt: expected text, token ids or messages, got {"),
        (None, "prompt: expected text, token ids or messages, got None"),
        (b"x", "prompt: expected text, token ids or messages, got b'x'"),
        ("x\ud800", r"prompt: expected text of valid Unicode, got 'x\\ud800'$"),
        ([5, "x"], r"prompt_token_ids: expected a list of token ids, .*, got \[5, 'x'\]$"),
        ([7] * 1000 + [-1], r"prompt_token_ids: expected .*\.\.\. \(Value out of range: -1\)$"),
        ([], "prompt: expected text, token ids or messages, got none"),
    ],
)
def test_an_input_that_is_none_is_refused(address: str, wrong: Any, said: str) -> None:
    with Client(address) as client, pytest.raises(InvalidRequestError, match=said):
        client.generate(wrong)


@pytest.mark.parametrize("timeout", TIMEOUTS)
async def test_a_completion_async(address: str, timeout: float | None) -> None:
    async with AsyncClient(address, timeout=timeout) as client:
        assert (await client.generate("hello")).text == "hé!"
        assert [event async for event in client.stream("hello")] == list(EVENTS)
        assert await client.stats() == STATS
        assert await client.describe() == DESCRIPTION


def test_stats_and_description(address: str) -> None:
    with Client(address) as client:
        assert client.stats() == STATS
        assert client.stats().acceptance_length == 40 / 20
        assert client.stats().speculation.acceptance_at == (5 / 9, 0)
        assert client.stats().speculation.hit_rate == 2 / 3
        assert client.describe() == DESCRIPTION


def test_closing_the_stream_cancels(address: str, scripted: Scripted) -> None:
    with Client(address) as client:
        stream = client.stream("endless")
        assert next(stream) == EVENTS[0]
        stream.close()
        assert scripted.cancelled.wait(60)


@pytest.mark.parametrize("timeout", TIMEOUTS)
async def test_closing_the_stream_cancels_async(
    address: str, scripted: Scripted, timeout: float | None
) -> None:
    async with AsyncClient(address, timeout=timeout) as client:
        stream = client.stream("endless")
        assert await anext(stream) == EVENTS[0]
        await stream.aclose()
        assert await asyncio.to_thread(scripted.cancelled.wait, 60)


@pytest.mark.parametrize("timeout", TIMEOUTS)
async def test_cancelling_the_task_cancels(
    address: str, scripted: Scripted, timeout: float | None
) -> None:
    async with AsyncClient(address, timeout=timeout) as client:
        task = asyncio.create_task(client.generate("endless"))
        while not scripted.requests:
            await asyncio.sleep(0.01)
        task.cancel()
        assert await asyncio.to_thread(scripted.cancelled.wait, 60)
        with pytest.raises(asyncio.CancelledError):
            await task


ERRORS = [
    InvalidRequestError("temperature", "expected 0 or more, got -1"),
    PromptTooLongError("prompt", "it has too many tokens"),
    OverloadedError("1,024 requests are waiting; try again later"),
    WorkerLostError("the target went away"),
    UnavailableError("the server is still starting"),
    InternalError("a defect: naïve"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_errors_come_back_as_they_were(
    address: str, scripted: Scripted, error: PacelineError
) -> None:
    scripted.error = error
    with Client(address) as client, pytest.raises(type(error)) as caught:
        await asyncio.to_thread(client.generate, "error")
    all_caught = [caught.value]
    for timeout in TIMEOUTS:
        async with AsyncClient(address, timeout=timeout) as client_async:
            with pytest.raises(type(error)) as caught_async:
                await client_async.generate("error")
        all_caught.append(caught_async.value)
    for one in all_caught:
        assert type(one) is type(error)
        assert str(one) == str(error)
        assert getattr(one, "field", None) == getattr(error, "field", None)


async def test_a_shared_stream_that_breaks_ends_its_requests_and_the_next_gets_another(
    address: str,
) -> None:
    async with AsyncClient(address) as client:
        waiting = client.stream("endless")
        assert await anext(waiting) == EVENTS[0]
        for _ in range(2):
            with pytest.raises(UnavailableError, match="the server goes away"):
                await client.generate("aborted")
        with pytest.raises(UnavailableError, match="the server goes away"):
            await waiting_end(waiting)
        assert (await client.generate("hello")).text == "hé!"


async def waiting_end(stream: AsyncIterator[GenerateEvent]) -> None:
    async for _ in stream:
        pass


async def test_closing_the_client_ends_what_shares_its_stream(address: str) -> None:
    async with AsyncClient(address) as client:
        stream = client.stream("endless")
        assert await anext(stream) == EVENTS[0]
        task = asyncio.create_task(waiting_end(stream))
        await asyncio.sleep(0.05)
    with pytest.raises(UnavailableError, match="the client was closed"):
        await task


def test_a_torn_stream(address: str) -> None:
    torn = "expected finished as the last answer from the server at .*, got nothing after 3 tokens"
    with Client(address) as client, pytest.raises(ProtocolError, match=torn):
        list(client.stream("torn"))


def test_what_another_server_answers_is_told() -> None:
    """For example one of our workers. The second case is gRPC's own text when a write fails."""
    other = error_told(grpc.StatusCode.UNIMPLEMENTED, "Method not found!", {}, "here:1")
    assert "the server at here:1 is not an inference server of Paceline" in str(other)
    torn = error_told(grpc.StatusCode.INTERNAL, "Internal error from Core", {}, "here:1")
    assert (type(other), type(torn)) == (WrongServerError, UnavailableError)
    assert type(error_told(grpc.StatusCode.INTERNAL, "else", {}, "here:1")) is InternalError
    gone = "Stream removed (Socket closed (GOAWAY received))"
    ended = error_told(grpc.StatusCode.UNAVAILABLE, gone, {}, "here:1")
    assert "at here:1 broke: Socket closed (GOAWAY received); check whether" in str(ended)


async def test_options_as_keywords(address: str, scripted: Scripted) -> None:
    base = GenerateOptions(seed=3, max_tokens=5)
    with Client(address) as client:
        client.generate("hello", max_tokens=8, temperature=0.5)
        list(client.stream("hello", base, max_tokens=9))
    async with AsyncClient(address) as client_async:
        await client_async.generate("hello", max_tokens=8, temperature=0.5)
    first, second, third = (request_from_wire(one)[1] for one in scripted.requests)
    assert first == third == GenerateOptions(max_tokens=8, temperature=0.5)
    assert second == GenerateOptions(seed=3, max_tokens=9)
    assert base.max_tokens == 5


@pytest.mark.parametrize(
    ("wrong", "least", "most"),
    [
        ({"seed": -1}, 0, 2**64 - 1),
        ({"max_tokens": 2**32}, 1, 2**32 - 1),
        ({"logprobs": -1}, 0, 20),
    ],
)
def test_a_number_that_the_wire_does_not_hold_is_told_with_the_range(
    address: str, wrong: Any, least: int, most: int
) -> None:
    ((name, number),) = wrong.items()
    said = f"^{name}: expected an integer from {least} to {most}, got {number}$"
    with Client(address) as client, pytest.raises(InvalidRequestError, match=said):
        client.generate("Say", **wrong)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"max_tokens": "5"}, "an integer from 0 to 4294967295, got '5'"),
        ({"seed": 1.5}, "an integer from 0 to 18446744073709551615, got 1.5"),
        ({"temperature": "hot"}, "a number, got 'hot'"),
        ({"ignore_eos": "yes"}, "True or False, got 'yes'"),
        ({"merge": "no"}, "True or False, got 'no'"),
        ({"tenant": 5}, "text of valid Unicode, got 5"),
        ({"stop": [5]}, "a list of strings, got [5]"),
        ({"stop_token_ids": 5}, "a list of token ids, each an integer from 0 to 4294967295, got 5"),
        ({"logit_bias": {"a": 1}}, "a table from token ids to numbers, got {'a': 1}"),
        ({"logit_bias": [1]}, "a table from token ids to numbers, got [1]"),
        ({"rule": ["coupled"]}, "text of valid Unicode, got ['coupled']"),
        ({"policy": 5}, "text of valid Unicode, got 5"),
        ({"options": {"max_tokens": 5}}, "a GenerateOptions, got {'max_tokens': 5}"),
    ],
)
def test_a_value_of_another_type_is_told_in_the_words_of_its_field(
    address: str, wrong: Any, expected: str
) -> None:
    """The error uses neither protobuf's words nor TypeError."""
    (name,) = wrong
    with Client(address) as client, pytest.raises(InvalidRequestError) as caught:
        client.generate("Say", **wrong)
    assert str(caught.value).startswith(f"{name}: expected {expected}")


async def test_an_unknown_keyword_names_the_nearest(address: str, scripted: Scripted) -> None:
    expected = "max_token: there is no such option; did you mean max_tokens"
    misspelled: Any = {"max_token": 8}
    with Client(address) as client, pytest.raises(InvalidRequestError, match=expected):
        client.generate("hello", **misspelled)
    async with AsyncClient(address) as client_async:
        with pytest.raises(InvalidRequestError, match=expected):
            await client_async.generate("hello", **misspelled)
    assert scripted.requests == []


def test_the_keywords_are_the_fields() -> None:
    """`samples` is a parameter of the calls, since it decides what they return."""
    fields = get_type_hints(OptionFields) | {"samples": int | None}
    assert fields == get_type_hints(GenerateOptions)


def test_importing_the_package_loads_grpc_and_protobuf_only_when_a_client_is_named() -> None:
    """They take ten times as long to import as everything else."""
    loaded = "print(sorted({'grpc', 'google.protobuf', 'asyncio'} & set(sys.modules)))"
    program = f"import sys, paceline\n{loaded}\nfrom paceline import Client\n{loaded}"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.splitlines() == ["[]", "['asyncio', 'google.protobuf', 'grpc']"]


LOOPS = """
import asyncio, sys
from paceline import AsyncClient, UnavailableError

async def ask(address, timeout):
    async with AsyncClient(address, timeout=timeout) as client:
        await asyncio.gather(*[client.generate("Say") for _ in range(4)], client.stats())
        async for _ in client.stream("endless"):
            break
        asking = asyncio.create_task(client.generate("endless"))
        await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    try:
        async with AsyncClient("127.0.0.1:1", timeout=timeout) as client:
            await client.stats()
    except UnavailableError:
        pass

for number in range(10):
    asyncio.run(ask(sys.argv[1], 120 if number % 2 else None))
"""


def test_a_client_that_was_closed_leaves_nothing_to_a_later_event_loop(address: str) -> None:
    """gRPC has one poller in a process, which reports what an earlier loop left open."""
    command = [sys.executable, "-W", "error", "-c", LOOPS, address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

"""Hostile callers beside a well-behaved one: no 5xx, no stack trace, and its text is its own."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from random import Random
from typing import Any

import pytest

from cluster.gateway import app, server
from cluster.gateway.app import MAX_BODY_BYTES
from cluster.gateway.requests import FIELDS, REFUSED, SPECULATION
from tests.cluster.gateway.serving import Served, connection, head, running_gateway
from tests.cluster.system import (
    HOST,
    System,
    eventually,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

AT_ONCE = 8
PATHS = ("/v1/completions", "/v1/chat/completions")
STREAM: dict[str, Any] = {
    "prompt": "The quick brown fox",
    "max_tokens": 120,
    "ignore_eos": True,
    "temperature": 1.0,
    "seed": 7,
    "stream": True,
}
NAMES = (*FIELDS, *REFUSED["chat"], "model", "n", "stream", "stream_options", "speculation")


@pytest.fixture(autouse=True)
def no_error_is_logged(caplog: pytest.LogCaptureFixture) -> Any:
    """A defect is logged, with its stack trace."""
    with caplog.at_level(logging.ERROR):
        yield
    errors = [one for one in caplog.get_records("call") if one.levelno >= logging.ERROR]
    assert [record.getMessage() for record in errors] == []


def _value(random: Random, depth: int = 0) -> Any:
    """Any JSON value."""
    kinds = 9 if depth < 4 else 7
    match random.randrange(kinds):
        case 0:
            return random.choice([None, True, False])
        case 1:
            return random.choice([0, 1, -1, 2**31, 2**63, 2**64, -(2**70), 10**300, 10**4000])
        case 2:
            return random.choice([0.5, -0.0, 1e308, -1e308, 1e-320, 3.0])
        case 3:
            return random.choice(["", "a", "off", "coupled", "\0", "\N{SNOWMAN}" * 300, "a" * 5000])
        case 4:
            return random.choices(range(-2, 400), k=random.randrange(5))
        case 5:
            return [{"role": random.choice(["user", "tool", 3]), "content": "a"}]
        case 6:
            return {str(random.randrange(500)): random.uniform(-200, 200)}
        case 7:
            return [_value(random, depth + 1) for _ in range(random.randrange(4))]
        case _:
            keys = random.choices([*NAMES, *SPECULATION, "", "x" * 200], k=random.randrange(4))
            return {key: _value(random, depth + 1) for key in keys}


def _dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


def _as_int(value: Any) -> int:
    return value if isinstance(value, int) else 0


def random_body(random: Random) -> bytes:
    """The body of a request, most of them not what they should be."""
    asked: dict[str, Any] = {
        "prompt": random.choice(["a", [5, 6], ["a", "b"], [[7]]]),
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 4,
    }
    match random.randrange(10):
        case 0:
            return _dumped(_value(random))
        case 1:
            return random.randbytes(random.randrange(200))
        case 2:
            return _dumped(asked)[:-1] + b',"stop":"\xff\xfe\xed\xa0\x80"}'
        case 3:
            depth = random.choice([100, 199, 5_000, 100_000])
            return b'{"prompt":' + b"[" * depth + b"]" * depth + b"}"
        case 4:
            return (
                _dumped(asked)[:-1] + b',"seed":' + b"9" * random.choice([30, 4_300, 10**6]) + b"}"
            )
        case 5:
            return _dumped(asked)[:-1] + random.choice(
                [b',"top_p":NaN}', b',"top_p":1e999}', b',"stop":"\\ud800"}', b"}}", b""]
            )
        case 6:
            return _dumped(asked)
        case _:
            for name in random.choices([*NAMES, "prompt", "messages"], k=random.randrange(1, 4)):
                asked[name] = _value(random)
            for name in ("max_tokens", "max_completion_tokens"):
                # Few tokens, so that the test takes seconds.
                if asked.get(name, 0) is None or 16 < _as_int(asked.get(name)) < 2**32:
                    asked[name] = 4
            return _dumped(asked | {"n": 1} if random.random() < 0.9 else asked)


async def _asks(random: Random, served: Served) -> int:
    """A body that may hold anything, read to the end of its answer. Returns the status."""
    answer = await served.http.post(random.choice(PATHS), content=random_body(random))
    assert answer.status_code < 500, answer.text
    assert b"Traceback" not in answer.content
    if answer.status_code >= 400:
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
    return answer.status_code


async def _leaves(random: Random, served: Served) -> int:
    """Closes the connection in the middle of the headers, the body or the answer."""
    body = _dumped(STREAM)
    sent = head(len(body)) + body
    async with connection(served) as (_, writer):
        writer.write(sent[: random.randrange(1, len(sent) + 1)])
        await writer.drain()
        await asyncio.sleep(random.random() / 20)
    return 0


async def _is_no_http(random: Random, served: Served) -> int:
    """Bytes that are no request, or not one that HTTP allows."""
    async with connection(served) as (reader, writer):
        writer.write(
            random.choice(
                [
                    random.randbytes(300) + b"\r\n\r\n",
                    b"GET / HTTP/9.9\r\n\r\n",
                    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
                    b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
                    head(4).replace(b"Content-Length: 4", b"Transfer-Encoding: chunked")
                    + b"zz\r\n",
                    head(2) + b"{}" + b"garbage that follows a request\r\n\r\n",
                ]
            )
        )
        with suppress(ConnectionError):
            answer = await asyncio.wait_for(reader.read(65_536), 60)
            assert not answer.startswith(b"HTTP/1.1 5")
            assert b"Traceback" not in answer
    return 0


async def _beside_a_stream(served: Served, system: System, count: int) -> Counter[int]:
    """`count` hostile requests while one stream after the other runs. Returns the statuses."""
    expected = await _streamed(served)
    statuses: Counter[int] = Counter()
    left = iter(range(count))

    async def be_hostile() -> None:
        for number in left:
            random = Random(number)
            kinds = [_asks] * 8 + [_leaves, _is_no_http]
            statuses[await random.choice(kinds)(random, served)] += 1

    hostile = asyncio.gather(*(be_hostile() for _ in range(AT_ONCE)))
    try:
        while not hostile.done():
            assert await _streamed(served) == expected
        await hostile
    finally:
        hostile.cancel()
        await asyncio.gather(hostile, return_exceptions=True)
    await eventually(lambda: served.gateway.num_open == 0)
    await system.settle()
    return statuses


async def _streamed(served: Served) -> str:
    text = ""
    async with served.http.stream("POST", "/v1/completions", json=STREAM) as answer:
        async for line in answer.aiter_lines():
            if line and line != "data: [DONE]":
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    return text


async def test_200_hostile_requests_change_nothing_beside_them(
    served: Served, system: System
) -> None:
    statuses = await _beside_a_stream(served, system, 200)
    assert statuses[200] > 10, statuses
    assert statuses[400] > 50, statuses


@pytest.mark.release
async def test_1000_hostile_requests_change_nothing_beside_them(
    served: Served, system: System
) -> None:
    statuses = await _beside_a_stream(served, system, 1_000)
    assert statuses.total() == 1_000


async def test_a_prompt_of_10_mb_tells_both_lengths(served: Served) -> None:
    answer = await served.complete(prompt="a" * 10_000_000)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "8,388,608" in answer.json()["error"]["message"]
    assert "10,000,000" in answer.json()["error"]["message"]


async def test_a_body_that_is_too_large_is_413(served: Served) -> None:
    answer = await served.http.post(PATHS[0], content=b" " * (MAX_BODY_BYTES + 1))
    assert answer.status_code == 413
    assert f"{MAX_BODY_BYTES:,}" in answer.json()["error"]["message"]


async def test_a_body_without_end_is_not_kept(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "MAX_BODY_BYTES", 1_000)
    monkeypatch.setattr(app, "MAX_READ_BYTES", 100_000)
    async with connection(served) as (reader, writer):
        writer.write(head(10**12))
        for _ in range(11):
            writer.write(b" " * 10_000)
            await writer.drain()
        answer = await asyncio.wait_for(reader.read(), 60)
    assert answer.startswith(b"HTTP/1.1 413 ")


async def test_a_slow_body_is_408(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_SECONDS", 0.2)
    async with connection(served) as (reader, writer):
        writer.write(head(100) + b'{"prompt":')
        answer = await asyncio.wait_for(reader.read(), 60)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code": "request_timeout"' in answer


async def test_large_bodies_at_once_are_refused_and_small_ones_are_not(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "MAX_BODIES_BYTES", 150_020)
    large = b'{"prompt":"' + b"a" * 150_000
    async with connection(served) as (_, writer):
        writer.write(head(1_000_000) + large)  # It stalls.
        await eventually(lambda: served.gateway.num_open == 1)
        await writer.drain()
        await asyncio.sleep(0.2)
        async with connection(served) as (reader, another):
            another.write(head(1_000_000) + large)
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b"retry-after: 1" in answer
        assert (await served.complete(prompt="a", max_tokens=1)).status_code == 200
    await eventually(lambda: served.gateway.num_open == 0)
    refused = await served.complete(prompt="a" * 150_000)
    assert refused.json()["error"]["code"] == "context_length_exceeded"


async def test_bodies_that_stall_do_not_count_as_requests_that_run(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "MAX_OPEN_REQUESTS", 1)
    async with connection(served) as (_, writer):
        writer.write(head(100) + b"{")
        await eventually(lambda: served.gateway.num_open == 1)
        assert (await served.complete(prompt="a", max_tokens=1)).status_code == 200
    await eventually(lambda: served.gateway.num_open == 0)


async def test_too_many_requests_are_429(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MAX_OPEN_REQUESTS", 0)
    answer = await served.complete(prompt="a")
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"


async def test_headers_that_do_not_come_end_the_connection(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "IDLE_SECONDS", 0.3)
    async with connection(served) as (reader, writer):
        with suppress(ConnectionError):
            for _ in range(1_000):
                writer.write(b"X-A: b\r\n" if _ else b"GET /health HTTP/1.1\r\nHost: a\r\n")
                await writer.drain()
                await asyncio.sleep(0.05)
                if reader.at_eof():
                    break
            assert await asyncio.wait_for(reader.read(), 60) == b""


@pytest.mark.timing
async def test_connections_beyond_the_limit_are_closed(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 0)
    async with connection(served) as (reader, _):
        with suppress(ConnectionError):
            # Less than IDLE_SECONDS, after which it is closed anyhow.
            assert await asyncio.wait_for(reader.read(), 5) == b""


async def test_a_late_byte_ends_the_connection_and_its_request(
    served: Served, system: System
) -> None:
    """Else the gateway would not notice that the caller leaves."""
    body = _dumped(STREAM | {"stream": False, "max_tokens": 450})
    async with connection(served) as (reader, writer):
        writer.write(head(len(body)) + body)
        await eventually(lambda: system.driver.scheduler.num_running == 1)
        writer.write(b"\r\n")
        with suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 60) == b""
    await eventually(lambda: served.gateway.num_open == 0)
    await system.settle()


async def test_two_lengths_of_a_body_are_refused(served: Served) -> None:
    both = b"Content-Length: 5\r\nTransfer-Encoding: chunked"
    async with connection(served) as (reader, writer):
        writer.write(head(5).replace(b"Content-Length: 5", both) + b"0\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 60)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in answer
    assert b"got both" in answer


async def test_a_method_that_a_path_does_not_take_is_told_the_others(served: Served) -> None:
    answer = await served.http.get("/v1/completions")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    assert (await served.http.post("/v1/completions/")).status_code == 404


SOCKET_BYTES = 8_192


@asynccontextmanager
async def _slow_caller(served: Served, asked: dict[str, Any]) -> AsyncIterator[socket.socket]:
    """A socket with a small buffer, which sent a request and reads nothing."""
    body = _dumped(asked)
    with socket.socket() as caller:
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
        caller.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(caller, (HOST, served.port))
        await loop.sock_sendall(caller, head(len(body)) + body)
        await eventually(lambda: served.gateway.num_open == 1)
        yield caller


async def test_an_answer_that_is_not_read_ends(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight choices of 120 tokens are 200 KB of events: more than sockets and uvicorn take."""
    monkeypatch.setattr(server, "UNREAD_SECONDS", 0.3)
    async with (
        running_gateway([system.server.address], send_buffer=SOCKET_BYTES) as served,
        _slow_caller(served, STREAM | {"n": 8}),
    ):
        await eventually(lambda: served.gateway.num_open == 0)
    await system.settle()


async def test_an_answer_that_is_read_slowly_comes_whole(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes longer than every alarm, and counts as open until it is sent.

    In JSON each byte of the prompt, which is repeated, has six characters: 150 KB.
    """
    monkeypatch.setattr(server, "UNREAD_SECONDS", 0.7)
    monkeypatch.setattr(server, "IDLE_SECONDS", 0.7)
    asked = {"prompt": "\1" * 400, "n": 64, "echo": True, "max_tokens": 1, "seed": 3}
    loop = asyncio.get_running_loop()
    async with (
        running_gateway([system.server.address], send_buffer=SOCKET_BYTES) as served,
        _slow_caller(served, asked) as caller,
    ):
        answer, length = b"", 10**9
        while len(answer) < length:
            part = await loop.sock_recv(caller, 4_096)
            assert part, f"cut after {len(answer)} bytes"
            answer += part
            if length == 10**9:
                headers, _, _ = answer.partition(b"\r\n\r\n")
                found = re.search(rb"content-length: (\d+)", headers)
                assert found is not None
                length = len(headers) + 4 + int(found[1])
            if len(answer) < length // 2:
                assert served.gateway.num_open == 1
            await asyncio.sleep(0.05)
        assert answer.count(b'"index"') == 64
        await eventually(lambda: served.gateway.num_open == 0)
    await system.settle()


async def test_an_answer_that_is_not_read_does_not_hold_up_the_end(system: System) -> None:
    """No error is logged. The caller is there until the gateway has ended."""
    async with (
        AsyncExitStack() as callers,
        running_gateway([system.server.address], send_buffer=SOCKET_BYTES) as served,
    ):
        await callers.enter_async_context(_slow_caller(served, STREAM | {"n": 8}))
        await eventually(lambda: system.driver.scheduler.num_running > 0)
        await asyncio.sleep(1)
        assert served.gateway.num_open == 1
    await system.settle()

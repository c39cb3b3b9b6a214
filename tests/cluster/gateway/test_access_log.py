"""The line that a gateway logs for each HTTP request."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from tests.cluster.gateway.serving import Served, connection, head
from tests.cluster.system import eventually
from workers.process.logs import ACCESS, json_lines

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKED: dict[str, Any] = {"prompt": "secret sea", "max_tokens": 20, "seed": 5, "ignore_eos": True}


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, ACCESS)
    return caplog


def _told(log: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    form = json_lines("gateway")
    return [json.loads(form.format(line)) for line in log.records if line.name == ACCESS]


async def _soon(log: pytest.LogCaptureFixture, count: int) -> list[dict[str, Any]]:
    """As many lines. A line may be written just after the caller has its answer."""
    await eventually(lambda: len(_told(log)) >= count)
    return _told(log)


async def test_a_request_is_one_line_without_its_text(
    served: Served, log: pytest.LogCaptureFixture
) -> None:
    answer = (await served.complete(**ASKED, n=2)).json()
    (told,) = await _soon(log, 1)
    assert told["request_id"] == answer["id"]
    assert told["model"] == answer["model"]
    assert told["status"] == 200
    assert (told["method"], told["path"]) == ("POST", "/v1/completions")
    assert told["tokens"] == answer["usage"]["completion_tokens"] == 40
    assert told["finish_reasons"] == ["length", "length"]
    assert 0 < told["ttft_seconds"] < told["seconds"]
    assert 1 <= told["acceptance_length"] <= 9
    assert "secret" not in json.dumps(told)
    for choice in answer["choices"]:
        assert choice["text"] not in json.dumps(told)


async def test_refused_and_unknown_requests_are_told_without_what_was_sent(
    served: Served, log: pytest.LogCaptureFixture
) -> None:
    await served.complete(prompt="secret", max_tokens=0)
    await served.http.get("/secret?secret=1")
    refused, unknown = await _soon(log, 2)
    assert (refused["status"], refused["path"]) == (400, "/v1/completions")
    assert (unknown["status"], unknown["path"]) == (404, "other")
    assert "secret" not in json.dumps([refused, unknown])


async def test_a_caller_who_leaves_is_told(served: Served, log: pytest.LogCaptureFixture) -> None:
    body = json.dumps(ASKED | {"max_tokens": 400, "stream": True}).encode()
    async with connection(served) as (reader, writer):
        writer.write(head(len(body)) + body)
        await reader.readuntil(b"data: ")
    (told,) = await _soon(log, 1)
    assert told["status"] == 499
    assert told["finish_reasons"] == ["abort"]
    assert told["tokens"] < 400


async def test_without_a_reader_nothing_is_made(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, ACCESS)
    await asyncio.gather(*(served.http.get("/health") for _ in range(3)))
    assert not _told(caplog)

"""`paceline gateway` as a process: it serves, and drains on SIGTERM."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import openai
import pytest

from paceline import AsyncClient, Client
from paceline.options import OptionFields
from tests.deploy.conftest import Call, Served, becomes_true
from tests.deploy.shell import ROOT

ASKED: dict[str, Any] = {"prompt": "sea", "max_tokens": 250, "seed": 5, "ignore_eos": True}


@contextmanager
def _serving(address: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, and the URL that it prints."""
    command = [sys.executable, "-m", "deploy.cli", "gateway", "--address", address, "--port", "0"]
    with subprocess.Popen(
        [*command, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found is not None
            yield process, found[0]
        finally:
            process.kill()


def _status(http: httpx2.Client, path: str) -> int:
    return http.post(path, json=ASKED | {"max_tokens": 1}).status_code


def test_sigterm_lets_open_requests_end_and_refuses_new_ones(served: Served) -> None:
    with Client(served.address) as client:
        given = {name: value for name, value in ASKED.items() if name != "prompt"}
        expected = client.generate("sea", **given).text
    with _serving(served.address) as (process, url), httpx2.Client(timeout=120) as http:
        with openai.OpenAI(base_url=url, api_key="none") as asking:
            assert [model.id for model in asking.models.list()] == ["target"]
        path = f"{url}/completions"
        with http.stream("POST", path, json=ASKED | {"stream": True}) as answer:
            lines = answer.iter_lines()
            texts = [next(lines)]
            process.send_signal(signal.SIGTERM)
            assert becomes_true(lambda: _status(http, path) == 503, 60)
            texts += [line for line in lines if line]
        assert texts.pop() == "data: [DONE]"
        told = [json.loads(line.removeprefix("data: ")) for line in texts if line]
        assert "".join(one["choices"][0]["text"] for one in told) == expected
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 143
        assert errors == ""


def test_grpc_is_served_beside_http(served: Served) -> None:
    command = [sys.executable, "-m", "deploy.cli", "gateway", "--address", served.address]
    with subprocess.Popen(
        [*command, "--port", "0", "--grpc-port", "0"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[-1]
            with Client(served.address) as direct, Client(address) as through:
                given: OptionFields = {"max_tokens": 8, "seed": 5, "ignore_eos": True}
                told = direct.generate("sea", **given)
                assert through.generate("sea", **given).text == told.text
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 143
        finally:
            process.kill()


@pytest.mark.timing
def test_a_stream_without_requests_does_not_delay_the_end(served: Served) -> None:
    async def ask_and_end(process: subprocess.Popen[str], address: str) -> float:
        """Ends the server while the client's stream is open. Returns how long it took."""
        async with AsyncClient(address) as client:
            await client.generate("sea", max_tokens=2)
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 60) == 143
            return time.monotonic() - began

    command = [sys.executable, "-m", "deploy.cli", "gateway", "--address", served.address]
    with subprocess.Popen(
        [*command, "--port", "0", "--grpc-port", "0", "--drain", "50"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[-1]
            assert asyncio.run(ask_and_end(process, address)) < 25
        finally:
            process.kill()


def test_a_second_signal_cuts_open_requests_off(served: Served) -> None:
    with _serving(served.address) as (process, url), httpx2.Client(timeout=120) as http:
        path = f"{url}/completions"
        with http.stream("POST", path, json=ASKED | {"stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            assert becomes_true(lambda: _status(http, path) == 503, 60)
            process.send_signal(signal.SIGTERM)
            last, done = [line for line in lines if line][-2:]
        assert done == "data: [DONE]"
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130
        assert errors == "1 request did not end in time: cut off\n"


def test_without_a_driver_it_says_so_and_waits() -> None:
    with _serving("127.0.0.1:9", "--log-format", "json") as (process, url):
        assert httpx2.get(f"{url}/models").status_code == 503
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 143
        assert errors.startswith("not serving yet: 127.0.0.1:9: no server could be reached")
        (line,) = errors.splitlines()[1:]
        told = json.loads(line)
        assert (told["level"], told["process"]) == ("INFO", "gateway")
        assert (told["method"], told["path"], told["status"]) == ("GET", "/v1/models", 503)


def test_bad_usage_is_one_line(call: Call) -> None:
    bad = call("gateway", "--address", "127.0.0.1:8001,nowhere")
    assert bad.code == 2
    assert "nowhere" in bad.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        bad = call("gateway", "--address", "127.0.0.1:9", "--port", port)
    assert bad.code == 3
    where = f"cannot listen at 127.0.0.1:{port}: Address already in use"
    hint = "choose another --host or --port, or end what holds it"
    assert bad.stderr == f"error: {where}; {hint}\n"
    bad = call("gateway", "--address", "127.0.0.1:9", "--otlp-endpoint", "collector:4317")
    assert bad.code != 0
    assert 'expected a URL such as http://127.0.0.1:4317, got "collector:4317"' in bad.stderr

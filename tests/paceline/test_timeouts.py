"""A timeout ends a request at the caller and at the server. Connecting counts."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from paceline import AsyncClient, Client, DeadlineError, InvalidRequestError
from paceline.v1 import inference_pb2, inference_pb2_grpc
from tests.paceline.scripted import EVENTS, Scripted

PASSED = r"did not end within its timeout of 0\.2 s, and was cancelled"
LONG = 120.0
"""A timeout that does not pass here."""


@pytest.mark.parametrize(
    ("of_client", "of_call"), [(0.2, None), (None, 0.2), (LONG, 0.2), (0.2, LONG)]
)
async def test_a_call_goes_by_its_own_timeout_else_by_the_clients(
    address: str, scripted: Scripted, of_client: float | None, of_call: float | None
) -> None:
    passes = (of_call or of_client) == 0.2
    prompt = "endless" if passes else "hello"
    with Client(address, timeout=of_client) as client:
        await check_generate(asyncio.to_thread(client.generate, prompt, timeout=of_call), passes)
    assert not passes or await asyncio.to_thread(scripted.cancelled.wait, 60)
    scripted.cancelled.clear()
    async with AsyncClient(address, timeout=of_client) as client_async:
        await check_generate(client_async.generate(prompt, timeout=of_call), passes)
        assert not passes or await asyncio.to_thread(scripted.cancelled.wait, 60)
    assert len(scripted.requests) == 2, "none was sent again"


async def check_generate(asked: Any, passes: bool) -> None:
    begin = time.monotonic()
    if not passes:
        assert (await asked).text == "hé!"
        return
    with pytest.raises(DeadlineError, match=PASSED):
        await asked
    assert time.monotonic() - begin >= 0.2


async def test_on_a_shared_stream_it_ends_its_request_alone(
    address: str, scripted: Scripted
) -> None:
    async with AsyncClient(address) as client:
        bystander = client.stream("endless")
        assert await anext(bystander) == EVENTS[0]
        stream = client._shared
        with pytest.raises(DeadlineError, match=PASSED):
            await client.generate("endless", timeout=0.2)
        assert client._shared is stream, "it got a call of its own"
        assert await anext(bystander) == EVENTS[1]
        assert (await client.generate("hello", timeout=LONG)).text == "hé!"
        assert client._shared is stream


async def test_what_came_in_time_is_still_read(address: str, scripted: Scripted) -> None:
    """A caller that does not read has its request cancelled in time too."""
    async with AsyncClient(address) as client:
        stream = client.stream("endless", timeout=0.2)
        assert await anext(stream) == EVENTS[0]
        assert await asyncio.to_thread(scripted.cancelled.wait, 60)
        assert await anext(stream) == EVENTS[1]
        with pytest.raises(DeadlineError, match=PASSED):
            await anext(stream)


async def test_it_covers_connecting() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        patient = Client(address, connect_timeout=600)
        with patient as client, pytest.raises(DeadlineError, match=PASSED):
            await asyncio.to_thread(client.generate, "hello", timeout=0.2)
        hasty = Client(address, connect_timeout=600, timeout=0.2)
        with hasty as client, pytest.raises(DeadlineError, match=PASSED):
            await asyncio.to_thread(client.stats)
        async with AsyncClient(address, connect_timeout=600, timeout=0.2) as client_async:
            with pytest.raises(DeadlineError, match=PASSED):
                await client_async.generate("hello")
            with pytest.raises(DeadlineError, match=PASSED):
                await client_async.describe()


class Deaf(inference_pb2_grpc.InferenceServiceServicer):
    """Reads nothing from a shared stream."""

    def DescribeModel(self, request: Any, context: Any) -> inference_pb2.DescribeModelResponse:
        return inference_pb2.DescribeModelResponse()

    def GenerateMany(
        self, request_iterator: Any, context: Any
    ) -> Iterator[inference_pb2.GenerateManyResponse]:
        while context.is_active():
            time.sleep(0.05)
        yield inference_pb2.GenerateManyResponse()


async def test_requests_to_a_server_that_reads_nothing_leave_nothing_behind() -> None:
    """A caller that tries again and again must not fill its own memory with unsent messages."""
    server = grpc.server(ThreadPoolExecutor(2))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Deaf(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            for _ in range(20):
                asked = [client.generate("x" * 1_000_000, timeout=0.05) for _ in range(5)]
                for outcome in await asyncio.gather(*asked, return_exceptions=True):
                    assert isinstance(outcome, DeadlineError)
            assert client._shared is not None
            unsent = client._shared._unsent.values()
            assert sum(message.ByteSize() for message in unsent) < 1_000_000
            assert client._shared._answers == {}
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize("wrong", [0, -1.0, math.inf, math.nan, 1e30, "5"])
async def test_what_is_no_timeout_is_refused(address: str, wrong: Any) -> None:
    said = "expected seconds above 0, at most "
    for client_class in (Client, AsyncClient):
        with pytest.raises(InvalidRequestError, match=f"^timeout: {said}"):
            client_class(address, timeout=wrong)
        with pytest.raises(InvalidRequestError, match=f"^connect_timeout: {said}"):
            client_class(address, connect_timeout=wrong)
    with Client(address) as client, pytest.raises(InvalidRequestError, match=f"^timeout: {said}"):
        client.generate("hello", timeout=wrong)
    async with AsyncClient(address) as client_async:
        with pytest.raises(InvalidRequestError, match=f"^timeout: {said}"):
            await client_async.generate("hello", timeout=wrong)

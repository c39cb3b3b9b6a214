"""A driver with API keys: who may call what, as which tenant, and how much."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster.access.gate import LOG_SECONDS, MORE_CALLS, Gate
from cluster.access.keys import KeyFile, new_key
from paceline import AsyncClient, Client, Retries
from paceline.errors import (
    InvalidRequestError,
    PermissionDeniedError,
    RateLimitedError,
    UnauthenticatedError,
)
from paceline.generation import Chunk, Finished
from paceline.options import GenerateOptions, OptionFields
from paceline.v1 import inference_pb2, inference_pb2_grpc, trace_pb2, trace_pb2_grpc
from tests.cluster.access.key_files import entry_of, keys_in, write_keys
from tests.cluster.system import System, eventually, make_checkpoints, running_system
from tests.workers.grpc_peers import call_of_bytes

pytestmark = pytest.mark.asyncio(loop_scope="module")
ASKED: OptionFields = {"max_tokens": 8, "seed": 3, "ignore_eos": True}
_BROKEN = (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)
LONG: OptionFields = {"max_tokens": 400, "seed": 3, "ignore_eos": True}


@dataclass
class Guarded:
    system: System
    keys: dict[str, str]
    gate: Gate
    path: Path

    def client(self, name: str) -> AsyncClient:
        once = Retries(0)  # Each refusal is seen.
        return AsyncClient(self.system.server.address, key=self.keys[name], retries=once)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guarded(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Guarded]:
    folder = tmp_path_factory.mktemp("access")
    path = folder / "keys"
    keys = keys_in(
        path,
        alice={"tenant": "a"},
        bob={"tenant": "b", "concurrency": 2},
        slow={"tenant": "s", "requests_per_minute": 2},
        boss={"tenant": "o", "role": "operator"},
        gone={"tenant": "g"},
    )
    gate = Gate(KeyFile(path))
    checkpoints = make_checkpoints(folder)
    async with running_system(
        checkpoints, drafters={"d0": checkpoints.drafter}, gate=gate, access={"key": keys["boss"]}
    ) as system:
        yield Guarded(system, keys, gate, path)


def calls(channel: Any) -> dict[str, Callable[..., Any]]:
    """Every method, as a call that gives its first answer."""
    inference = inference_pb2_grpc.InferenceServiceStub(channel)
    request = inference_pb2.GenerateRequest(prompt="sea", max_tokens=1)

    async def first(call: Any) -> Any:
        async for answer in call:
            call.cancel()
            return answer
        raise AssertionError("no answer")

    async def staying(message: Any) -> AsyncIterator[Any]:
        yield message
        await asyncio.Event().wait()  # The end of what is sent would end the call.

    many = inference_pb2.GenerateManyRequest(number=1, begin=request)
    listed = reflection_pb2.ServerReflectionRequest(list_services="")
    return {
        "DescribeModel": lambda **of: inference.DescribeModel(
            inference_pb2.DescribeModelRequest(), **of
        ),
        "Generate": lambda **of: first(inference.Generate(request, **of)),
        "GenerateMany": lambda **of: first(inference.GenerateMany(staying(many), **of)),
        "Stats": lambda **of: inference.Stats(inference_pb2.StatsRequest(), **of),
        "Trace": lambda **of: first(
            trace_pb2_grpc.TraceServiceStub(channel).Trace(trace_pb2.TraceRequest(), **of)
        ),
        "reflection": lambda **of: first(
            reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
                iter([listed]), **of
            )
        ),
        "health": lambda **of: health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), **of
        ),
    }


async def test_each_method_asks_for_the_key_that_it_needs(guarded: Guarded) -> None:
    user, operator = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED
    refused: dict[str, dict[str, grpc.StatusCode]] = {
        "none": dict.fromkeys(
            ("DescribeModel", "Generate", "GenerateMany", "Stats", "Trace", "reflection"), user
        ),
        "alice": dict.fromkeys(("Stats", "Trace", "reflection"), operator),
        "boss": {},
    }
    async with grpc.aio.insecure_channel(guarded.system.server.address) as channel:
        for name, expected in refused.items():
            key = guarded.keys.get(name)
            metadata = () if key is None else (("authorization", f"Bearer {key}"),)
            got: dict[str, grpc.StatusCode] = {}
            details = ""
            for method, call in calls(channel).items():
                try:
                    await asyncio.wait_for(call(metadata=metadata), 30)
                except grpc.aio.AioRpcError as error:
                    got[method] = error.code()
                    details += error.details() or ""
            assert key is None or key not in details
            assert got == expected, name


async def test_each_sample_counts_as_a_request(guarded: Guarded) -> None:
    async with guarded.client("bob") as bob:
        assert len(await bob.generate("sea", samples=2, **ASKED)) == 2
        with pytest.raises(PermissionDeniedError, match="counts as 3 requests"):
            await bob.generate("sea", samples=3, **ASKED)
        async with aclosing(bob.stream("sea", samples=2, **LONG)) as events:
            await anext(events)
            with pytest.raises(RateLimitedError, match="2 requests running"):
                await bob.generate("sea", **ASKED)
        await guarded.system.settle()
        assert len(await bob.generate("sea", samples=2, **ASKED)) == 2  # All places are back.


async def test_a_call_that_sends_nothing_is_refused_without_a_key(guarded: Guarded) -> None:
    """It would stay open, and a server takes a bounded number of calls."""
    path = "/paceline.v1.InferenceService/GenerateMany"
    async with grpc.aio.insecure_channel(guarded.system.server.address) as channel:
        call = call_of_bytes(channel, path)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call.read(), 30)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_key_has_so_many_open_calls(guarded: Guarded) -> None:
    """Streams without requests count; other keys do not notice."""
    path = "/paceline.v1.InferenceService/GenerateMany"
    metadata = (("authorization", f"Bearer {guarded.keys['bob']}"),)
    async with grpc.aio.insecure_channel(guarded.system.server.address) as channel:
        made: list[Any] = [call_of_bytes(channel, path, metadata) for _ in range(2 + MORE_CALLS)]
        for call in made:
            await call.wait_for_connection()
        with pytest.raises(RateLimitedError, match="10 open calls"):
            async with guarded.client("bob") as client:
                await eventually_refused(client)
        async with guarded.client("alice") as client:
            assert (await client.generate("sea", **ASKED)).token_ids
        for call in made:
            call.cancel()


async def eventually_refused(client: AsyncClient) -> None:
    """The streams above may arrive a moment later."""
    for _ in range(100):
        await client.describe()
        await asyncio.sleep(0.05)


async def test_tokenizing_counts_as_a_request(guarded: Guarded) -> None:
    async with guarded.client("bob") as client:
        asked = [client.tokenize("sea " * 2000) for _ in range(20)]
        told = await asyncio.gather(*asked, return_exceptions=True)
    assert any(isinstance(one, RateLimitedError) for one in told)


async def test_both_clients_carry_their_key(guarded: Guarded) -> None:
    address = guarded.system.server.address
    async with guarded.client("alice") as client:
        text = (await client.generate("sea", **ASKED)).text
        with pytest.raises(PermissionDeniedError, match="operator's API key; 'alice'"):
            await client.stats()

    def blocking() -> str:
        with Client(address, key=guarded.keys["alice"]) as client:
            assert client.describe().model == "target"
            with pytest.raises(PermissionDeniedError):
                client.stats()
            return client.generate("sea", **ASKED).text

    assert await asyncio.to_thread(blocking) == text
    assert (await guarded.system.client.stats()).steps > 0
    for key in (None, new_key()):
        async with AsyncClient(address, key=key) as stranger:
            with pytest.raises(UnauthenticatedError):
                await stranger.generate("sea", **ASKED)
        with Client(address, key=key) as blocked, pytest.raises(UnauthenticatedError):
            await asyncio.to_thread(blocked.generate, "sea")


@pytest.mark.parametrize("key", ["", "two words", "schlüssel", "x" * 513, "line\nbreak", 7])
async def test_a_client_refuses_what_is_no_key_without_quoting_it(key: Any) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(InvalidRequestError, match="key: expected 1 to 512") as caught:
            kind("127.0.0.1:1", key=key)
        assert not key or str(key) not in str(caught.value)


async def test_the_key_decides_the_tenant(guarded: Guarded) -> None:
    """What one tenant asked is in the prefix cache for its own requests, and for no other's."""
    prompt = list(range(3, 200))
    hits = []
    for name, tenant in (("alice", None), ("bob", None), ("alice", "a"), ("alice", "")):
        before = guarded.system.driver.scheduler.prefix_hit_tokens
        async with guarded.client(name) as client:
            await client.generate(prompt, GenerateOptions(**ASKED), tenant=tenant)
        hits.append(guarded.system.driver.scheduler.prefix_hit_tokens - before)
    assert hits[0] == hits[1] == 0
    assert hits[2] > 0
    assert hits[3] > 0
    async with guarded.client("bob") as client:
        with pytest.raises(PermissionDeniedError, match="of another tenant"):
            await client.generate(prompt, GenerateOptions(**ASKED), tenant="a")


async def test_a_key_that_floods_costs_the_others_nothing(guarded: Guarded) -> None:
    async with guarded.client("bob") as flooding, guarded.client("alice") as client:
        asked = [asyncio.create_task(flooding.generate("sea", **LONG)) for _ in range(500)]
        expected = await guarded.system.client.generate("sea", **ASKED)
        for _ in range(5):
            assert (await client.generate("sea", **ASKED)).token_ids == expected.token_ids
        results = await asyncio.gather(*asked, return_exceptions=True)
    refused = [one for one in results if isinstance(one, RateLimitedError)]
    assert len(refused) == len(results) - 2
    assert all("'bob'" in str(one) and one.retry_seconds == 1.0 for one in refused)
    await guarded.system.settle()
    async with guarded.client("bob") as client:  # Its places came back.
        both = [asyncio.create_task(client.generate("sea", **ASKED)) for _ in range(2)]
        await asyncio.gather(*both)


async def test_the_places_of_a_cancelled_stream_come_back(guarded: Guarded) -> None:
    async with guarded.client("bob") as client:
        for _ in range(6):
            async with aclosing(client.stream("sea", **LONG)) as events:
                async for event in events:
                    if isinstance(event, Chunk):
                        break
            await eventually(lambda: not guarded.system.driver.scheduler.num_running)
        assert (await client.generate("sea", **ASKED)).token_ids


async def test_a_rate_says_when_to_come_back_in_the_standard_form(guarded: Guarded) -> None:
    async with guarded.client("slow") as client:
        for _ in range(2):
            await client.generate("sea", **ASKED)
        with pytest.raises(RateLimitedError, match="2 requests a minute") as caught:
            await client.generate("sea", **ASKED)
    assert caught.value.retry_seconds is not None
    assert 20 < caught.value.retry_seconds <= 30
    metadata = (("authorization", f"Bearer {guarded.keys['slow']}"),)
    async with grpc.aio.insecure_channel(guarded.system.server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await calls(channel)["Generate"](metadata=metadata)
    assert ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    trailers: Any = ended.value.trailing_metadata()
    rich = status_pb2.Status.FromString(dict(trailers)["grpc-status-details-bin"])
    info = error_details_pb2.RetryInfo()
    assert rich.details[0].Unpack(info)
    assert 20 < info.retry_delay.ToMilliseconds() / 1000 <= 30


async def test_a_removed_key_begins_nothing_more_and_what_runs_goes_on(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        guarded.client("gone") as client,
        guarded.client("alice") as other,
        aclosing(client.stream("sea", **LONG)) as events,
    ):
        assert await anext(events)
        with monkeypatch.context() as patch:
            patch.setattr("cluster.access.keys.LOOK_SECONDS", 0.0)
            write_keys(
                guarded.path,
                *(
                    entry_of(key, name, tenant="a" if name == "alice" else name, **more)
                    for name, key in guarded.keys.items()
                    if name != "gone"
                    for more in ({"role": "operator"} if name == "boss" else {},)
                ),
            )
            with pytest.raises(UnauthenticatedError, match="no longer valid"):
                await client.generate("sea", **ASKED)  # On the stream that is open.
            await other.generate("sea", **ASKED)
        last = None
        async for event in events:
            last = event
        assert isinstance(last, Finished)


async def test_wrong_keys_leave_few_lines_and_no_key_in_the_log(
    guarded: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    wrong, began = [new_key() for _ in range(1000)], time.monotonic()
    with caplog.at_level(logging.DEBUG):
        async with grpc.aio.insecure_channel(guarded.system.server.address) as channel:
            call = calls(channel)["DescribeModel"]
            for first in range(0, len(wrong), 50):
                results = await asyncio.gather(
                    *(
                        call(metadata=(("authorization", f"Bearer {key}"),))
                        for key in wrong[first : first + 50]
                    ),
                    return_exceptions=True,
                )
                codes = {one.code() for one in results if isinstance(one, grpc.aio.AioRpcError)}
                assert all(isinstance(one, grpc.aio.AioRpcError) for one in results)
                assert grpc.StatusCode.UNAUTHENTICATED in codes
                # On a host that is too busy, a connection may end in between.
                assert codes <= {grpc.StatusCode.UNAUTHENTICATED, *_BROKEN}
            # A header beyond gRPC's own limit never comes to us.
            huge = (("authorization", "Bearer " + "x" * 100_000),)
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await call(metadata=huge)
            assert ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        async with guarded.client("alice") as client:
            await client.generate("sea", **ASKED)
    ours = [record for record in caplog.records if record.name.startswith("cluster.access")]
    assert len(ours) <= 2 + (time.monotonic() - began) / LOG_SECONDS
    known = [*wrong, *guarded.keys.values()]
    assert not any(key in caplog.text for key in known)

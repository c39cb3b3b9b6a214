"""Answers that break off at random points go on without loss or repetition.

What breaks: the connection of a client, the one between gateway and driver, and the driver itself,
which starts again at its address. The client is that of the library, or one of HTTP.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from cluster.driver.driver import DriverOptions
from cluster.driver.service import serve_driver
from cluster.gateway import drivers
from paceline import AsyncClient, Chunk, Client, GenerateEvent, GenerateOptions
from paceline.generation import CompletionBuilder
from paceline.options import OptionFields
from tests.cluster.gateway.serving import Served, running_gateway
from tests.cluster.system import HOST, Checkpoints, Wire, start_drafter, start_target
from tests.held_ports import held_port
from tests.release import at_release
from workers.emulated.latency_profiles import LinkProfile
from workers.emulated.relay import Relay
from workers.process.server import RunningServer

PROMPT = "The quick brown fox jumps"
TOKENS = 100
POLICIES: dict[str, OptionFields] = {
    "chain": {"policy": "chain"},
    "tree": {"policy": "fanout", "branches": 3},
}
ANSWERS = [(policy, temperature) for policy in POLICIES for temperature in (0.0, 1.0)]
Step = Callable[[], Awaitable[object]]


@dataclass
class _Front:
    """A driver that can be restarted, and relays to it whose connections can be broken."""

    options: DriverOptions
    port: int
    server: RunningServer
    near: Wire
    far: Wire
    client: AsyncClient
    blocking: Client
    served: Served

    async def restart(self) -> None:
        await self.server.stop()
        _, self.server = await serve_driver(self.options, host=HOST, port=self.port)


@asynccontextmanager
async def _front(checkpoints: Checkpoints) -> AsyncIterator[_Front]:
    """Steps take at least 4 ms, so that answers are under way when something breaks."""
    async with AsyncExitStack() as stack:
        target = await start_target(checkpoints.target)
        stack.push_async_callback(target.stop)
        relay = Relay(target.address, LinkProfile(rtt_ms=4))
        stack.callback(relay.close)
        drafter = await start_drafter(checkpoints.drafter)
        stack.push_async_callback(drafter.stop)
        options = DriverOptions(
            checkpoints.target, (relay.address,), drafter_addresses={"d0": drafter.address}
        )
        port = stack.enter_context(held_port())
        _, server = await serve_driver(options, host=HOST, port=port)
        wires = []
        for _ in range(2):
            wire = Wire(server.address)
            wires.append((wire, await wire.open()))
            stack.push_async_callback(wire.close)
        (near, near_address), (far, far_address) = wires
        client = await stack.enter_async_context(AsyncClient(near_address))
        blocking = stack.enter_context(Client(near_address))
        served = await stack.enter_async_context(running_gateway([far_address]))
        front = _Front(options, port, server, near, far, client, blocking, served)
        try:
            yield front
        finally:
            await front.server.stop()


def _options(policy: str, temperature: float) -> GenerateOptions:
    options = GenerateOptions(seed=7, max_tokens=TOKENS, ignore_eos=True, window=4)
    return replace(replace(options, temperature=temperature), **POLICIES[policy])


async def _over_grpc(front: _Front, options: GenerateOptions, at: int, cut: Step) -> str:
    """The answer's tokens and text. `cut` is done after `at` tokens."""
    builder, num_tokens = CompletionBuilder(), 0
    async for event in front.client.stream(PROMPT, options):
        builder.add(event)
        before, num_tokens = num_tokens, num_tokens + _length(event)
        if before <= at < num_tokens:
            await cut()
    whole = builder.build()
    return json.dumps([whole.token_ids, whole.text])


async def _blocking(front: _Front, options: GenerateOptions, at: int, cut: Step) -> str:
    """The same with the client for plain code, in a thread."""
    loop = asyncio.get_running_loop()

    def read() -> str:
        builder, num_tokens = CompletionBuilder(), 0
        for event in front.blocking.stream(PROMPT, options):
            builder.add(event)
            before, num_tokens = num_tokens, num_tokens + _length(event)
            if before <= at < num_tokens:
                asyncio.run_coroutine_threadsafe(_wait_for(cut), loop).result()
        whole = builder.build()
        return json.dumps([whole.token_ids, whole.text])

    return await asyncio.to_thread(read)


async def _wait_for(step: Step) -> None:
    await step()


def _length(event: GenerateEvent) -> int:
    return len(event.token_ids) if isinstance(event, Chunk) else 0


async def _over_http(
    front: _Front, options: GenerateOptions, at: int, cut: Step, n: int = 1
) -> str:
    """The texts of all choices. `cut` is done after `at` characters of all."""
    speculation = {"policy": options.policy, "branches": options.branches, "window": 4}
    asked = {
        "prompt": PROMPT,
        "n": n,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "seed": options.seed,
        "temperature": options.temperature,
        "speculation": speculation,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    texts, usage = [""] * n, None
    async with front.served.http.stream("POST", "/v1/completions", json=asked) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if not line or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event
            usage = event.get("usage") or usage
            before = sum(map(len, texts))
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
            if before <= at < sum(map(len, texts)):
                await cut()
    assert usage is not None
    assert usage["completion_tokens"] == n * TOKENS
    return json.dumps(texts)


async def _samples(front: _Front, options: GenerateOptions, at: int, cut: Step) -> str:
    """The tokens and texts of two samples. `cut` is done after `at` tokens of both."""
    builder, num_tokens = CompletionBuilder(2), 0
    async for event in front.client.stream(PROMPT, options, samples=2):
        builder.add(event)
        before, num_tokens = num_tokens, num_tokens + _length(event)
        if before <= at < num_tokens:
            await cut()
    return json.dumps([[one.token_ids, one.text] for one in builder.build_all()])


async def _n_over_http(front: _Front, options: GenerateOptions, at: int, cut: Step) -> str:
    return await _over_http(front, options, at, cut, n=2)


WAYS = {"grpc": _over_grpc, "blocking": _blocking, "http": _over_http}
SAMPLES = {"grpc": _samples, "http": _n_over_http}


async def _nothing() -> None:
    pass


async def _cut_at_random(front: _Front, count: int) -> None:
    rng = random.Random(17)
    whole = {
        (way, *answer): await WAYS[way](front, _options(*answer), 0, _nothing)
        for way in WAYS
        for answer in ANSWERS
    }
    for number in range(count):
        way = list(WAYS)[number % 3]
        what = "driver" if number % 4 == 3 else "connection"
        answer = ANSWERS[rng.randrange(len(ANSWERS))]
        at = rng.randrange(TOKENS * 3 // 4)
        wire = front.far if way == "http" else front.near
        connections = wire.num_accepted

        async def cut(what: str = what, wire: Wire = wire) -> None:
            if what == "driver":
                await front.restart()
            else:
                wire.reset()

        came = await WAYS[way](front, _options(*answer), at, cut)
        assert came == whole[way, *answer], (way, what, answer, at)
        # It did not end before the cut: someone came back for the rest.
        assert wire.num_accepted > connections, (way, what, answer, at)


@pytest.mark.parametrize("count", [10, *at_release([50])])
async def test_streams_cut_at_random(
    checkpoints: Checkpoints, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drivers, "LOOK_SECONDS", 0.1)
    async with _front(checkpoints) as front:
        await _cut_at_random(front, count)


async def test_all_samples_of_a_stream_that_is_cut_go_on(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drivers, "LOOK_SECONDS", 0.1)
    options = _options("chain", 1.0)
    async with _front(checkpoints) as front:
        for way, ask in SAMPLES.items():
            whole = await ask(front, options, 0, _nothing)
            wire = front.near if way == "grpc" else front.far
            for at in (0, 90, 170):
                connections = wire.num_accepted

                async def cut(wire: Wire = wire) -> None:
                    wire.reset()

                assert await ask(front, options, at, cut) == whole, (way, at)
                assert wire.num_accepted > connections, (way, at)
            assert await ask(front, options, 60, front.restart) == whole, way

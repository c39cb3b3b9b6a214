"""A thousand hostile requests beside well-behaved ones: nobody is hurt, nothing is left behind."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import math
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest

from cluster.driver.driver import Driver, DriverOptions
from cluster.driver.service import serve_driver
from paceline import AsyncClient, GenerateOptions
from paceline.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from paceline.wire.requests import request_to_wire
from tests.cluster.system import HOST, Checkpoints, DrafterChoice, eventually, running_system
from tests.tiny import make_tiny_checkpoint
from tests.workers.grpc_peers import END
from workers.drafting.desk import DraftingDesk
from workers.target.step_sequences import TargetSession

NUM_HOSTILE, WARM_UP = 1_000, 300
NUM_WITH_WORKERS_IN_SIGHT = 200
AT_ONCE = 16
NUM_BYSTANDERS = 8
VOCAB_SIZE = 384
CONTEXT = 1_024
DEADLINE = 600.0
"""Seconds after which a hostile request counts as hung."""

FLAT_BYTES = 8 * 1024 * 1024
"""Upper bound on the growth of the driver's process after the warm-up.

That is 12 KB for each of the 700 requests; about 1 KB is seen. What one request holds while it runs
is more: its prompt, its tokens and their hashes, its answers. The callers run in the same process.
"""

Request = inference_pb2.GenerateRequest


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    folder = tmp_path_factory.mktemp("hostile")
    return Checkpoints(
        *[
            make_tiny_checkpoint(folder / name, max_position_embeddings=CONTEXT)
            for name in ("target", "drafter")
        ]
    )


def _number(random: Random) -> float:
    return random.choice([0.0, -1.0, 0.5, 1.0, 2.0, 1e30, -1e30, math.nan, math.inf, 1e-40])


def _random_fields(random: Random) -> Request:
    """A request with random values of the right types in any field."""
    request = Request(ignore_eos=random.random() < 0.5)
    request.prompt_token_ids.token_ids.extend(random.choices(range(400), k=random.randrange(9)))
    sampling = request.sampling
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"):
        if random.random() < 0.2:
            setattr(sampling, name, _number(random))
    for name in ("top_k", "min_tokens"):
        if random.random() < 0.2:
            setattr(sampling, name, random.choice([0, 1, 7, 2**32 - 1]))
    for name in ("max_tokens", "window", "branches"):
        if random.random() < 0.3:
            setattr(request, name, random.choice([0, 1, 4, 64, 2**32 - 1]))
    if random.random() < 0.3:
        request.policy = random.choice(["off", "chain", "auto", "oracle", "\N{SNOWMAN}" * 200])
    if random.random() < 0.3:
        request.rule = random.choice(["coupled", "kseq", "dice", "\N{SNOWMAN}" * 200])
    if random.random() < 0.2:
        request.stopping = types_pb2.StoppingRule.ValueType(random.randrange(7))
    if random.random() < 0.2:
        request.drafter = random.choice(["model", "recycling", "oracle", "\N{SNOWMAN}" * 200])
    request.request_id = random.choice(["", "same", "a\nb\0c", "\N{SNOWMAN}" * 128, "x" * 129])
    request.tenant = random.choice(["", "bystander", f"{random.getrandbits(64)}", "y" * 500])
    request.merge = random.random() < 0.1
    return request


def _too_much(random: Random) -> Request:
    """A request that holds just as much as is allowed of something, or more."""
    request = Request(prompt="abc", max_tokens=4)
    count = random.choice([300, 5_000, 50_000])
    match random.randrange(7):
        case 0:
            for token_id in range(min(count, 20_000)):
                request.sampling.logit_bias[token_id] = random.uniform(-5, 5)
        case 1:
            request.stop.extend(["ab" * (count // 2) + "c"] * random.choice([1, 16]))
        case 2:
            request.stop.extend([chr(97 + n % 26) for n in range(count)])
        case 3:
            request.stop_token_ids.extend(random.choices(range(VOCAB_SIZE), k=count))
        case 4:
            request.prompt = "word " * count
        case 5:
            request.prompt_token_ids.token_ids.extend([5] * count)
        case 6:
            for _ in range(count):
                request.messages.messages.add(role="user", content="hello")
    return request


def _sound(random: Random) -> Request:
    """A request of a well-behaved caller."""
    options = GenerateOptions(
        temperature=random.choice([0.0, 1.0]),
        seed=random.getrandbits(63),
        max_tokens=random.choice([1, 20, 200]),
        policy=random.choice(["off", "chain", "fanout", "lockstep"]),
        stop=["a" * 255 + "b", "e"] if random.random() < 0.3 else [],
        repetition_penalty=random.choice([None, 1.3]),
        tenant=random.choice(["bystander", "other"]),
        ignore_eos=True,
    )
    prompt = random.choices(range(3, VOCAB_SIZE), k=random.choice([1, 30, 400]))
    return request_to_wire(prompt, options)


async def _reads_all(request: Request, stub: Any) -> None:
    async for _ in stub.Generate(request, timeout=DEADLINE):
        pass


async def asks_for_anything(random: Random, stub: Any) -> None:
    request = _random_fields(random)
    if not request.HasField("max_tokens"):
        request.max_tokens = 16
    await _reads_all(request, stub)


async def asks_for_too_much(random: Random, stub: Any) -> None:
    await _reads_all(_too_much(random), stub)


async def leaves(random: Random, stub: Any) -> None:
    """Cancel before the first answer, or after some."""
    call = stub.Generate(_sound(random), timeout=DEADLINE)
    for _ in range(random.choice([0, 0, 1, 3, 10])):
        if await call.read() is END:
            return
    call.cancel()


async def crowds_a_stream(random: Random, stub: Any) -> None:
    """Send good and bad requests on one stream; cancel some of them, and some that do not exist."""
    call = stub.GenerateMany(timeout=DEADLINE)
    for number in range(random.randrange(1, 8)):
        begun = random.choice([_sound, _random_fields])(random)
        if not begun.HasField("max_tokens"):
            begun.max_tokens = 16
        await call.write(inference_pb2.GenerateManyRequest(number=number, begin=begun))
        if random.random() < 0.5:
            cancelled = random.choice([number, random.getrandbits(64)])
            cancel = inference_pb2.CancelRequest()
            await call.write(inference_pb2.GenerateManyRequest(number=cancelled, cancel=cancel))
    match random.randrange(3):
        case 0:
            await call.write(inference_pb2.GenerateManyRequest(number=1))  # says nothing
            await call.read()
        case 1:
            await call.done_writing()
            while await call.read() is not END:
                pass
    call.cancel()


async def sends_no_message(random: Random, channel: grpc.aio.Channel) -> None:
    """Send bytes that are not a GenerateRequest."""
    call = channel.unary_stream("/paceline.v1.InferenceService/Generate", None, None)
    async for _ in call(random.randbytes(random.choice([1, 100, 10_000])), timeout=DEADLINE):
        pass


ENDS = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
}
"""The allowed ends of a hostile request."""


async def _one(random: Random, channel: grpc.aio.Channel, seen: Counter[str]) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    kinds = [asks_for_anything, asks_for_too_much, leaves, crowds_a_stream]
    kind: Any = random.choices([*kinds, sends_no_message], weights=[5, 3, 5, 3, 1])[0]
    code, details = grpc.StatusCode.OK, ""
    try:
        await kind(random, channel if kind is sends_no_message else stub)
    except grpc.aio.AioRpcError as error:
        code, details = error.code(), error.details() or ""
    except (asyncio.CancelledError, asyncio.InvalidStateError):
        code = grpc.StatusCode.CANCELLED  # by the caller itself
    if kind is sends_no_message and code is grpc.StatusCode.UNKNOWN:
        code = grpc.StatusCode.INVALID_ARGUMENT  # gRPC's own status, before any code of ours runs
    assert code in ENDS, (kind.__name__, code, details)
    seen[code.name] += 1


async def _many(count: int, seed: int, address: str, seen: Counter[str]) -> None:
    """Send `count` hostile requests, some at a time, each made from its own seed."""
    left = iter(range(count))
    async with grpc.aio.insecure_channel(address) as channel:

        async def goes_on() -> None:
            for number in left:
                await _one(Random(f"{seed} {number}"), channel, seen)

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(goes_on())


class Bystanders:
    """Well-behaved callers that repeat the same request until the block ends.

    Inside the block, all of them run, as they did before the hostile requests came.
    """

    def __init__(self, driver: Driver, address: str) -> None:
        self._driver = driver
        self._client = AsyncClient(address)
        self._is_over = False

    async def __aenter__(self) -> Bystanders:
        alone = await asyncio.gather(*map(self._ask, range(NUM_BYSTANDERS)))
        self._tasks = [
            asyncio.create_task(self._ask_again(number, text)) for number, text in enumerate(alone)
        ]
        await eventually(lambda: self._driver.scheduler.num_running == NUM_BYSTANDERS)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Raise if one failed, or had another text than alone."""
        self._is_over = True
        try:
            await asyncio.gather(*self._tasks)
        finally:
            await self._client.close()

    async def _ask(self, number: int) -> tuple[tuple[int, ...], str]:
        options = GenerateOptions(
            temperature=1.0,
            seed=number,
            max_tokens=600,
            ignore_eos=True,
            policy=("chain", "fanout", "off", "lockstep")[number % 4],
            tenant="bystander",
            stop=["never in the text \N{SNOWMAN}"],
        )
        answer = await self._client.generate(f"Well-behaved request number {number}", options)
        return answer.token_ids, answer.text

    async def _ask_again(self, number: int, expected: tuple[tuple[int, ...], str]) -> None:
        while not self._is_over:
            assert await self._ask(number) == expected


def _resident_bytes() -> int:
    """The resident memory of this process, after unused memory went back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@contextmanager
def _worker(*command: str) -> Iterator[str]:
    """Run a worker in a process of its own. Yields its address."""
    process = subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.release
async def test_a_thousand_hostile_requests_harm_nobody_and_leave_the_driver_as_it_was(
    checkpoints: Checkpoints,
) -> None:
    shard = ("workers.target.shard", str(checkpoints.target), "--kv-memory-mib", "16")
    with (
        _worker(*shard) as target,
        _worker("workers.drafting.drafter", str(checkpoints.drafter)) as model,
        _worker("workers.drafting.drafter", "--kind", "recycling") as recycling,
    ):
        options = DriverOptions(
            folder=checkpoints.target,
            target_addresses=(target,),
            drafter_addresses={"model": model, "recycling": recycling},
        )
        driver, server = await serve_driver(options, host=HOST)
        try:
            async with Bystanders(driver, server.address):
                seen: Counter[str] = Counter()
                await _many(WARM_UP, 1, server.address, seen)
                before = _resident_bytes()
                await _many(NUM_HOSTILE - WARM_UP, 2, server.address, seen)
                grown = _resident_bytes() - before
            await _check_that_nothing_is_left(driver)
            workers = driver.stats().workers
        finally:
            await server.stop()
    assert seen.total() == NUM_HOSTILE
    assert min(seen["OK"], seen["INVALID_ARGUMENT"]) > 100, seen
    assert [(one.reconnects, one.malformed) for one in workers] == [(0, 0)] * 3
    assert grown < FLAT_BYTES, f"{grown:,} bytes more than after the warm-up"


async def _check_that_nothing_is_left(driver: Driver) -> None:
    """Check that no request, sequence or block is left."""
    scheduler = driver.scheduler
    await eventually(lambda: not (scheduler.num_running or scheduler.num_waiting))
    scheduler.check_integrity()
    assert driver._dispatch.num_open == 0


@pytest.mark.long
async def test_hostile_requests_leave_nothing_at_the_workers(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    desks: list[DraftingDesk] = []
    sessions: list[TargetSession] = []
    _remember(monkeypatch, "workers.drafting.drafter.DraftingDesk", desks)
    _remember(monkeypatch, "workers.target.stepper.TargetSession", sessions)
    drafters: dict[str, DrafterChoice] = {"model": checkpoints.drafter, "recycling": "recycling"}
    async with running_system(checkpoints, drafters=drafters, kv_memory_mib=16) as system:
        async with Bystanders(system.driver, system.server.address):
            await _many(NUM_WITH_WORKERS_IN_SIGHT, 3, system.server.address, Counter())
        await _check_that_nothing_is_left(system.driver)
        await eventually(lambda: not any(desk.num_open for desk in desks))
        for desk in desks:
            desk.check_integrity()
        # The step of a further request also reports the ends of all earlier ones.
        await system.client.generate("a", max_tokens=2, ignore_eos=True)
        (session,) = sessions
        session.check_integrity()
        assert len(session._sequences) == 1


def _remember(monkeypatch: pytest.MonkeyPatch, name: str, made: list[Any]) -> None:
    """Collect every object that is made of the class with this name."""
    module, _, attribute = name.rpartition(".")
    kind = getattr(__import__(module, fromlist=[attribute]), attribute)

    def make(*args: Any, **kwargs: Any) -> Any:
        made.append(kind(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(name, make)

"""A shard of the target: the gRPC servicer of target.proto around an engine.

Everything runs on one event loop, the forward pass included: a step has nothing to overlap with on
its own device, and stepping in a thread was measured to gain nothing. gRPC answers pings below
Python, so a long pass does not look like a dead process.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import typer

from paceline.errors import ConfigError, PacelineError
from paceline.v1 import target_pb2, target_pb2_grpc
from workers.cores import pin_cores
from workers.engine.open import DEVICES, AnyEngine, Device, device_of
from workers.engine.rank_parts import Progress
from workers.engine.tensor_parallel.group import Deadlines, Group
from workers.engine.tensor_parallel.ranked import RankedEngine, group_of
from workers.engine.tensor_parallel.sharding import Place
from workers.engine.weight_form import Dtype, WeightForm
from workers.loading import in_own_thread, load_engine
from workers.server import RunningServer, start_server, status_code
from workers.standalone import (
    parse_choice,
    parse_cores,
    parse_weights,
    run_standalone,
)
from workers.target_stepper import StepEngine, Stepper, VerdictsOf
from workers.verdicts import verdicts_of
from workers.worker_clock import WorkerClock

SERVICE_NAME = target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name
TAKE_OVER_SECONDS = 0.5
"""How long a second Step stream waits for the first to end, before it is refused."""

_LONGEST_SESSION = 64
_log = logging.getLogger(__name__)
_Context = grpc.aio.ServicerContext[Any, Any]
_END = grpc.aio.EOF  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class TargetShardOptions:
    """What a shard loads, and where it computes.

    `weights`: on a CPU, where `dtype` is "auto". `kv_memory_bytes`: for KV blocks; None: by the
    device (open_engine). `max_model_len` None: the checkpoint's. `cores` None: wherever the system
    puts its threads. `device`: "cpu", "cuda" or "auto"; `batch_invariant`: on a GPU.
    `place` and `deadlines`: of a tensor-parallel shard.
    """

    folder: Path
    weights: WeightForm = "float32"
    threads: int = 1
    kv_memory_bytes: int | None = 256 * 1024 * 1024
    max_model_len: int | None = None
    cores: tuple[int, ...] | None = None
    device: Device = "cpu"
    dtype: Dtype = "auto"
    batch_invariant: bool = True
    place: Place = field(default_factory=Place)
    deadlines: Deadlines = field(default_factory=Deadlines)


class TargetShard(target_pb2_grpc.TargetServiceServicer):
    """Answers UNAVAILABLE until `begin`. `threads`: of the engine."""

    def __init__(self, *, threads: int = 1, clock: WorkerClock | None = None) -> None:
        self._engine: StepEngine | None = None
        self._verdicts_of: VerdictsOf = verdicts_of
        self._threads = threads
        self._clock = clock or WorkerClock()
        # Held by the stream that may step: KV blocks belong to it.
        self._live = asyncio.Lock()

    def add_to(self, server: grpc.aio.Server) -> tuple[str]:
        """Have a server offer it; the names of its services."""
        target_pb2_grpc.add_TargetServiceServicer_to_server(self, server)
        return (SERVICE_NAME,)

    def begin(self, engine: StepEngine, verdicts_of: VerdictsOf = verdicts_of) -> None:
        """Start serving. `verdicts_of` takes what the engine's `step` returns."""
        self._engine, self._verdicts_of = engine, verdicts_of

    async def DescribeTarget(
        self, request: target_pb2.DescribeTargetRequest, context: _Context
    ) -> target_pb2.DescribeTargetResponse:
        return _describe(await self._loaded(context))

    async def Meet(
        self, request: target_pb2.MeetRequest, context: _Context
    ) -> target_pb2.MeetResponse:
        engine = await self._loaded(context)
        if not 0 < len(request.session) <= _LONGEST_SESSION:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"session: expected 1 to {_LONGEST_SESSION} characters, got {len(request.session)}",
            )
        if isinstance(engine, RankedEngine) and engine.group is not None:
            await self._take(context, else_status=grpc.StatusCode.UNAVAILABLE)
            try:
                await in_own_thread(lambda: _meet(engine, request), threads=self._threads)
            except PacelineError as error:
                await context.abort(status_code(error), str(error))
            finally:
                self._live.release()
        return target_pb2.MeetResponse(description=_describe(engine))

    async def _take(self, context: _Context, *, else_status: grpc.StatusCode) -> None:
        """Take the shard for a meeting or a stream; the caller releases it."""
        try:
            async with asyncio.timeout(TAKE_OVER_SECONDS):
                await self._live.acquire()
        except TimeoutError:
            await context.abort(
                else_status, "this shard is stepping for another stream; end that one first"
            )

    # It reads and writes by the context rather than iterate and yield: a generator that is
    # cancelled at a yield is closed by whoever collects it, and until then the next stream would
    # find the shard taken. The next step is asked for while the answer is on its way, not after it.
    async def Step(  # type: ignore[override]
        self, request_iterator: AsyncIterator[target_pb2.StepRequest], context: _Context
    ) -> None:
        engine = await self._loaded(context)
        await self._take(context, else_status=grpc.StatusCode.FAILED_PRECONDITION)
        reading = asyncio.ensure_future(context.read())
        try:
            stepper = Stepper(engine, self._verdicts_of, self._clock)
            while (request := await reading) is not _END:
                response = stepper.step(request)
                reading = asyncio.ensure_future(context.read())
                await context.write(response)
        except PacelineError as error:
            await context.abort(status_code(error), str(error))
        finally:
            if (group := group_of(engine)) is not None:
                group.leave()  # Whoever waits for this rank fails at once.
            self._live.release()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _loaded(self, context: _Context) -> StepEngine:
        if self._engine is None:
            await context.abort(
                grpc.StatusCode.UNAVAILABLE, "the checkpoint is still being loaded; try again"
            )
        assert self._engine is not None
        return self._engine


def _describe(engine: StepEngine) -> target_pb2.DescribeTargetResponse:
    place, rendezvous = Place(), None
    if (group := group_of(engine)) is not None:
        place, rendezvous = group.place, group.rendezvous
    return target_pb2.DescribeTargetResponse(
        model=engine.info.name,
        vocab_size=engine.info.vocab_size,
        vocabulary_digest=engine.info.vocabulary_digest,
        max_model_len=engine.max_model_len,
        block_size=engine.block_size,
        num_blocks=engine.num_blocks,
        rank=place.rank,
        tensor_parallel=place.degree,
        end_token_ids=engine.info.end_token_ids,
        pid=os.getpid(),
        batch_invariant=bool(engine.batch_invariant),
        rendezvous=rendezvous or "",
        checkpoint_digest=engine.info.digest,
    )


def _meet(engine: RankedEngine, request: target_pb2.MeetRequest) -> None:
    """Raises WorkerLostError; CheckpointError where the ranks loaded different things."""
    assert engine.group is not None
    engine.group.meet(request.session, request.rendezvous)
    try:
        engine.agree()
    except PacelineError:
        engine.group.leave()
        raise


async def serve_target_shard(
    options: TargetShardOptions, *, host: str, port: int = 0, progress: Progress | None = None
) -> RunningServer:
    """Listen, load the checkpoint in a thread, then report SERVING.

    `progress` is told what is loaded, from that thread; None: the log is. Raises UnavailableError
    when the port cannot be bound (before anything is loaded), ConfigError for cores that cannot be
    had, for a rank that is none and for more shards than heads, CheckpointError when the checkpoint
    cannot be used.
    """
    if options.cores is not None:
        pin_cores(options.cores)
    shard, group = TargetShard(threads=options.threads), _group_of(options, host)

    async def load() -> None:
        shard.begin(await load_target(options, group=group, progress=progress))

    return await serve_once_loaded(shard, load, host=host, port=port)


async def load_target(
    options: TargetShardOptions, *, group: Group | None = None, progress: Progress | None = None
) -> AnyEngine:
    """The engine of a shard, in a thread. Raises what serve_target_shard does but for the port."""
    return await load_engine(
        options.folder,
        weights=options.weights,
        threads=options.threads,
        kv_memory_bytes=options.kv_memory_bytes,
        max_model_len=options.max_model_len,
        device=options.device,
        dtype=options.dtype,
        batch_invariant=options.batch_invariant,
        group=group,
        progress=progress or _LoggedProgress(options.place),
    )


async def serve_once_loaded(
    shard: TargetShard, load: Callable[[], Awaitable[None]], *, host: str, port: int
) -> RunningServer:
    """Listen, have `load` make the shard begin, then report SERVING."""
    server = await start_server(shard.add_to, host=host, port=port, serving=False)
    await server.serve_once(load)
    return server


def _group_of(options: TargetShardOptions, host: str) -> Group | None:
    place = options.place
    if not 0 <= place.rank < place.degree:
        raise ConfigError(f"rank: expected 0 to {place.degree - 1}, got {place.rank}")
    if place.degree == 1:
        return None
    device = device_of(options.device)
    return Group(place, host=host, device=device, deadlines=options.deadlines)


class _LoggedProgress:
    """Says how much of a shard's share is loaded, at each tenth."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._tenths = 0

    def __call__(self, done: int, total: int) -> None:
        tenths = 10 * done // max(total, 1)
        if tenths > self._tenths:
            self._tenths = tenths
            _log.info(
                "shard %d of %d: %d of %d MiB loaded",
                self._place.rank,
                self._place.degree,
                done >> 20,
                total >> 20,
            )


def main(
    folder: Path,
    host: str = "127.0.0.1",
    port: int = 0,
    weights: str = "float32",
    threads: int = 1,
    kv_memory_mib: int = 256,
    max_model_len: int | None = None,
    cores: str | None = None,
    device: str = "cpu",
    rank: int = 0,
    degree: int = 1,
    collective_seconds: float = 30.0,
) -> None:
    """Serve a target shard from this process, without Ray: for tests and for looking into faults.

    FOLDER is a checkpoint. Port 0 takes a free one; the address is printed once it serves. DEVICE
    is cpu, cuda or auto. Several shards of one target: DEGREE of them, RANK from 0 on;
    COLLECTIVE_SECONDS is how long one waits for the others in a step.
    """
    options = TargetShardOptions(
        folder=folder,
        weights=parse_weights(weights),
        threads=threads,
        kv_memory_bytes=kv_memory_mib * 1024 * 1024,
        max_model_len=max_model_len,
        cores=parse_cores(cores),
        device=parse_choice("device", device, DEVICES),
        place=Place(rank, degree),
        deadlines=Deadlines(collective=collective_seconds),
    )
    run_standalone(lambda: serve_target_shard(options, host=host, port=port))


if __name__ == "__main__":
    typer.run(main)

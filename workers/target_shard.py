"""A shard of the target: the gRPC servicer of target.proto around an engine.

Everything runs on one event loop, the forward pass included: a step has nothing to overlap with on
its own device, and stepping in a thread was measured to gain nothing. gRPC answers pings below
Python, so a long pass does not look like a dead process.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import grpc
import typer

from paceline.errors import PacelineError
from paceline.v1 import target_pb2, target_pb2_grpc
from workers.cores import pin_cores
from workers.engine.checkpoint import CheckpointInfo
from workers.engine.cuda.loading import Dtype
from workers.engine.open import DEVICES, Device
from workers.engine.slices import Slice
from workers.engine.weight_form import WeightForm
from workers.loading import load_engine
from workers.server import RunningServer, start_server, status_code
from workers.standalone import parse_choice, parse_cores, parse_weights, run_standalone
from workers.target_session import EngineLimits, TargetSession, VerdictTask
from workers.verdicts import verdicts_of

SERVICE_NAME = target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name
TAKE_OVER_SECONDS = 0.5
"""How long a second Step stream waits for the first to end, before it is refused."""

_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class TargetShardOptions:
    """What a shard loads, and where it computes.

    `weights`: "float32" or "int8". `kv_memory_bytes`: for KV blocks; None: by the device
    (open_engine). `max_model_len` None: the checkpoint's. `cores` None: wherever the system puts
    its threads. `device`: "cpu", "cuda" or "auto"; `dtype` and `batch_invariant`: on a GPU.
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


class StepEngine(Protocol):
    """What a shard steps: an engine (workers/engine/open.py), or an emulated device in its place.

    Durations are seconds; `forward_end` is time.perf_counter's.
    """

    @property
    def info(self) -> CheckpointInfo: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def batch_invariant(self) -> bool | None: ...
    @property
    def forward_seconds(self) -> float: ...
    @property
    def forward_end(self) -> float: ...

    def step(self, slices: Sequence[Slice]) -> Any:
        """Feed every slice; the rows for which logits are wanted, in order."""

    def move_kv(self, block_table: Sequence[int], moves: Sequence[tuple[int, int]]) -> None:
        """Copy KV of one slot of a sequence to another, pair by pair in order."""


VerdictsOf = Callable[[Any, Sequence[VerdictTask]], list[target_pb2.Verdict]]
"""From the rows of a step to its verdicts."""


class TargetShard(target_pb2_grpc.TargetServiceServicer):
    """Answers UNAVAILABLE until `engine` is set.

    `verdicts_of` takes what the engine's `step` returns.
    """

    def __init__(self, verdicts_of: VerdictsOf = verdicts_of) -> None:
        self.engine: StepEngine | None = None
        self._verdicts_of = verdicts_of
        # Held by the stream that may step: KV blocks belong to it.
        self._live = asyncio.Lock()

    async def DescribeTarget(
        self, request: target_pb2.DescribeTargetRequest, context: _Context
    ) -> target_pb2.DescribeTargetResponse:
        engine = await self._loaded(context)
        return target_pb2.DescribeTargetResponse(
            model=engine.info.name,
            vocab_size=engine.info.vocab_size,
            vocabulary_digest=engine.info.vocabulary_digest,
            max_model_len=engine.max_model_len,
            block_size=engine.block_size,
            num_blocks=engine.num_blocks,
            rank=0,
            tensor_parallel=1,
            end_token_ids=engine.info.end_token_ids,
            pid=os.getpid(),
            batch_invariant=bool(engine.batch_invariant),
        )

    # It writes to the context rather than yield: a generator that is cancelled at a yield is closed
    # by whoever collects it, and until then the next stream would find the shard taken.
    async def Step(  # type: ignore[override]
        self, request_iterator: AsyncIterator[target_pb2.StepRequest], context: _Context
    ) -> None:
        engine = await self._loaded(context)
        try:
            async with asyncio.timeout(TAKE_OVER_SECONDS):
                await self._live.acquire()
        except TimeoutError:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                "this shard is stepping for another stream; end that one first",
            )
        try:
            stepper = _Stepper(engine, self._verdicts_of)
            async for request in request_iterator:
                await context.write(stepper.step(request))
        except PacelineError as error:
            await context.abort(status_code(error), str(error))
        finally:
            self._live.release()

    async def _loaded(self, context: _Context) -> StepEngine:
        if self.engine is None:
            await context.abort(
                grpc.StatusCode.UNAVAILABLE, "the checkpoint is still being loaded; try again"
            )
        assert self.engine is not None
        return self.engine


class _Stepper:
    """Runs the steps of one stream."""

    def __init__(self, engine: StepEngine, verdicts_of: VerdictsOf) -> None:
        self._engine = engine
        self._verdicts_of = verdicts_of
        self._session = TargetSession(
            EngineLimits(
                vocab_size=engine.info.vocab_size,
                max_model_len=engine.max_model_len,
                block_size=engine.block_size,
                num_blocks=engine.num_blocks,
            )
        )
        self._forward_end: float | None = None

    def step(self, request: target_pb2.StepRequest) -> target_pb2.StepResponse:
        """Run one step. Raises ProtocolError naming the field that is wrong."""
        begin = time.perf_counter()
        work = self._session.begin_step(request)
        response = target_pb2.StepResponse(step=request.step)
        for block_table, moves in work.kv_moves:
            self._engine.move_kv(block_table, moves)
        if work.slices:
            rows = self._engine.step(work.slices)
            response.verdicts.extend(self._verdicts_of(rows, work.tasks))
            # Not before the verdicts: until then a GPU is still computing.
            response.forward_seconds = self._engine.forward_seconds
            # What the engine does around its forward pass counts as gap, so we look from its end.
            end = self._engine.forward_end
            if self._forward_end is not None:
                gap = end - self._engine.forward_seconds - self._forward_end
                response.gap_seconds = max(gap, 0.0)
            self._forward_end = end
        response.step_seconds = time.perf_counter() - begin
        return response


async def serve_target_shard(
    options: TargetShardOptions, *, host: str, port: int = 0
) -> RunningServer:
    """Listen, load the checkpoint in a thread, then report SERVING.

    Raises UnavailableError when the port cannot be bound (before anything is loaded), ConfigError
    for cores that cannot be had, CheckpointError when the checkpoint cannot be used.
    """
    if options.cores is not None:
        pin_cores(options.cores)
    shard = TargetShard()

    def add(server: grpc.aio.Server) -> tuple[str]:
        target_pb2_grpc.add_TargetServiceServicer_to_server(shard, server)
        return (SERVICE_NAME,)

    server = await start_server(add, host=host, port=port, serving=False)
    try:
        shard.engine = await load_engine(
            options.folder,
            weights=options.weights,
            threads=options.threads,
            kv_memory_bytes=options.kv_memory_bytes,
            max_model_len=options.max_model_len,
            device=options.device,
            dtype=options.dtype,
            batch_invariant=options.batch_invariant,
        )
        await server.report_serving()
    except BaseException:
        await server.stop()
        raise
    return server


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
) -> None:
    """Serve a target shard from this process, without Ray: for tests and for looking into faults.

    FOLDER is a checkpoint. Port 0 takes a free one; the address is printed once it serves. DEVICE
    is cpu, cuda or auto.
    """
    options = TargetShardOptions(
        folder=folder,
        weights=parse_weights(weights),
        threads=threads,
        kv_memory_bytes=kv_memory_mib * 1024 * 1024,
        max_model_len=max_model_len,
        cores=parse_cores(cores),
        device=parse_choice("device", device, DEVICES),
    )
    run_standalone(lambda: serve_target_shard(options, host=host, port=port))


if __name__ == "__main__":
    typer.run(main)

"""A target that computes nothing, so that only the driver matters; and one in a process.

python -m tests.cluster.fast_target CHECKPOINT TARGET_ADDRESS MAX_UNREAD_SECONDS
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import typer

from cluster.driver.driver import Driver, DriverOptions
from cluster.driver.service import serve_driver
from paceline.v1 import target_pb2
from tests.cluster.hostile import HungTarget, let_in, serve_false_target
from tests.cluster.system import HOST
from workers.engine.load.checkpoint import inspect_checkpoint
from workers.process.server import RunningServer

ROOM = 1 << 20
"""Upper bound on the tokens of a sequence."""


def token_at(position: int) -> int:
    """The target's token at a position, whatever came before."""
    return 100 + position * 31 % 200


class FastTarget(HungTarget):
    """Accepts no candidate. It answers steps while `gate` is set."""

    def __init__(self, vocabulary_digest: bytes) -> None:
        super().__init__(vocabulary_digest)
        self.gate = asyncio.Event()
        self.gate.set()

    async def DescribeTarget(
        self, request: target_pb2.DescribeTargetRequest, context: Any
    ) -> target_pb2.DescribeTargetResponse:
        response = await super().DescribeTarget(request, context)
        response.max_model_len, response.num_blocks = ROOM, 16 * ROOM // response.block_size
        return response

    async def Step(
        self, request_iterator: AsyncIterator[target_pb2.StepRequest], context: Any
    ) -> AsyncIterator[target_pb2.StepResponse]:
        await let_in(context)
        async for request in request_iterator:
            if request.HasField("hello"):
                continue
            await self.gate.wait()
            response = target_pb2.StepResponse(step=request.step, step_seconds=1e-4)
            for part in request.slices:
                if part.verdict:
                    position = part.start + len(part.token_ids) - part.window
                    response.verdicts.add(sequence_id=part.sequence_id, token_id=token_at(position))
            yield response


@asynccontextmanager
async def fast_target(folder: Path) -> AsyncIterator[tuple[FastTarget, RunningServer]]:
    target = FastTarget(inspect_checkpoint(folder).vocabulary_digest)
    server = await serve_false_target(target)
    try:
        yield target, server
    finally:
        await server.stop()


@asynccontextmanager
async def fast_system(
    folder: Path, **options: Any
) -> AsyncIterator[tuple[Driver, RunningServer, FastTarget]]:
    """A driver in this process. `options`: of the driver."""
    async with fast_target(folder) as (target, server):
        wanted = DriverOptions(folder, (server.address,), max_step_tokens=1 << 17, **options)
        driver, serving = await serve_driver(wanted, host=HOST)
        try:
            yield driver, serving, target
        finally:
            await serving.stop()


class DriverProcess:
    """A driver in a process of its own, whose memory can be measured."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.process = process
        self.address = address

    @property
    def megabytes(self) -> float:
        """The resident memory of the process."""
        rss: int = psutil.Process(self.process.pid).memory_info().rss
        return rss / 1e6


@asynccontextmanager
async def driver_process(
    folder: Path, target_address: str, *, max_unread_seconds: float
) -> AsyncIterator[DriverProcess]:
    command = [sys.executable, "-m", "tests.cluster.fast_target", str(folder), target_address]
    process = await asyncio.create_subprocess_exec(
        *command, str(max_unread_seconds), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        address = (await asyncio.wait_for(process.stdout.readline(), 300)).decode().strip()
        yield DriverProcess(process, address)
    finally:
        process.kill()
        await process.wait()


async def _serve(folder: Path, target_address: str, max_unread_seconds: float) -> None:
    options = DriverOptions(
        folder,
        (target_address,),
        max_waiting=5000,
        max_unread_seconds=max_unread_seconds,
        connect_seconds=200.0,
    )
    _, server = await serve_driver(options, host=HOST)
    typer.echo(server.address)
    await server.wait()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])))

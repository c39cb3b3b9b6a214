"""A target of ours without driver and Ray: its shards, and one stream of steps to all of them."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from cluster.decoding.instructions import OpenAtTarget, RunStep, Slice
from cluster.target_link import MEET_SECONDS
from cluster.worker_wire import step_to_wire
from paceline.channel import client_options
from paceline.errors import UnavailableError
from paceline.v1 import target_pb2, target_pb2_grpc

STREAM_SECONDS = 600.0
"""Deadline of a stream with all its steps."""
_DESCRIBE_SECONDS = 30.0
_END_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ShardSetting:
    """How a target is held: `degree` shards of `threads` threads each."""

    folder: Path
    weights: str
    degree: int
    threads: int
    kv_memory_mib: int
    max_model_len: int


@contextmanager
def running_target(setting: ShardSetting, *, log_folder: Path) -> Iterator[TargetStream]:
    """Start the shards, yield a stream to them, end them. Raises UnavailableError."""
    with ExitStack() as stack:
        shards = [
            stack.enter_context(_shard(setting, rank, log_folder / f"shard-{rank}.log"))
            for rank in range(setting.degree)
        ]
        yield stack.enter_context(_stream([shard.address() for shard in shards]))


class TargetStream:
    """Sends a step to every shard and waits for rank 0."""

    def __init__(self, descriptions: Sequence[target_pb2.DescribeTargetResponse]) -> None:
        self.description = descriptions[0]
        self.pids = [description.pid for description in descriptions]
        self._outboxes: list[queue.SimpleQueue[target_pb2.StepRequest | None]] = []
        self._answers: list[Iterator[target_pb2.StepResponse]] = []
        self._last_step = 0

    def connect(self, stubs: Sequence[target_pb2_grpc.TargetServiceStub]) -> None:
        """Open the streams."""
        for stub in stubs:
            outbox: queue.SimpleQueue[target_pb2.StepRequest | None] = queue.SimpleQueue()
            self._outboxes.append(outbox)
            call = stub.Step(iter(outbox.get, None), timeout=STREAM_SECONDS)
            self._answers.append(iter(call))

    def step(
        self,
        slices: Sequence[Slice],
        *,
        opens: Sequence[OpenAtTarget] = (),
        closes: Sequence[int] = (),
    ) -> target_pb2.StepResponse:
        """Run one step. Raises grpc.RpcError."""
        self._last_step += 1
        step = RunStep(self._last_step, tuple(opens), tuple(closes), tuple(slices))
        request = step_to_wire(step)
        for outbox in self._outboxes:
            outbox.put(request)
        responses = [next(answers) for answers in self._answers]
        return responses[0]

    def end(self) -> None:
        """End the streams in good order."""
        for outbox in self._outboxes:
            outbox.put(None)


@dataclass(frozen=True, slots=True)
class _Shard:
    process: subprocess.Popen[str]
    log: Path

    def address(self) -> str:
        """Wait until it serves. Raises UnavailableError when it ends instead."""
        assert self.process.stdout is not None
        address = self.process.stdout.readline().strip()
        if not address:
            tail = self.log.read_text(encoding="utf-8", errors="replace").strip()[-400:]
            raise UnavailableError(f"a shard did not start: {tail}")
        return address


@contextmanager
def _shard(setting: ShardSetting, rank: int, log: Path) -> Iterator[_Shard]:
    """A process that loads; all ranks of a target load at the same time."""
    command = [
        *(sys.executable, "-m", "workers.target_shard", str(setting.folder)),
        *("--weights", setting.weights, "--threads", str(setting.threads)),
        *("--kv-memory-mib", str(setting.kv_memory_mib)),
        *("--max-model-len", str(setting.max_model_len)),
        *("--rank", str(rank), "--degree", str(setting.degree)),
    ]
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(setting.threads)},
        ) as process,
    ):
        try:
            yield _Shard(process, log)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _meet(
    stubs: Sequence[target_pb2_grpc.TargetServiceStub],
) -> list[target_pb2.DescribeTargetResponse]:
    """What the shards are once they have met, each called at the same time."""
    request = target_pb2.DescribeTargetRequest()
    (first, *_) = [stub.DescribeTarget(request, timeout=_DESCRIBE_SECONDS) for stub in stubs]
    meeting = target_pb2.MeetRequest(session=uuid.uuid4().hex, rendezvous=first.rendezvous)
    calls = [stub.Meet.future(meeting, timeout=MEET_SECONDS) for stub in stubs]
    return [call.result().description for call in calls]


@contextmanager
def _stream(addresses: Sequence[str]) -> Iterator[TargetStream]:
    with ExitStack() as stack:
        channels = [
            stack.enter_context(grpc.insecure_channel(address, options=client_options()))
            for address in addresses
        ]
        stubs = [target_pb2_grpc.TargetServiceStub(channel) for channel in channels]
        stream = TargetStream(_meet(stubs))
        stream.connect(stubs)
        try:
            yield stream
        finally:
            stream.end()

"""Part "steps" of `bench engine`: how long a step takes, compared with two peers.

Shards run in processes of their own. They get steps over the Step stream, as the driver sends them,
one after another. Every step decodes or verifies for all sequences of the batch, which all have the
same length.
"""

from __future__ import annotations

import queue
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from cluster.decoding.instructions import OpenAtTarget, RunStep, Slice
from cluster.driver.meters import shard_name
from cluster.driver.target_links import MEET_SECONDS
from cluster.driver.worker_messages import step_to_wire
from deploy.bench import openvino_peer
from deploy.bench.engine import (
    BATCHES,
    PARTS,
    WINDOWS,
    own_name,
    peer_dtype,
    random_tokens,
    target_files,
    wanted_batches,
)
from deploy.bench.harness import CORES, Asked, Row
from deploy.bench.processes import WorkerProcess
from deploy.bench.transformers_peer import Answer, TransformersProcess
from paceline.channel import client_options
from paceline.sampling import SamplingParams, SequenceSpec
from paceline.v1 import target_pb2, target_pb2_grpc
from workers.engine.cpu.kv_cache import BLOCK_SIZE, block_bytes
from workers.engine.cpu.linears import activation_dtype
from workers.engine.kv_blocks import blocks_for
from workers.engine.load.model import part_config
from workers.engine.memory import kv_sizes_of
from workers.engine.options import BITS_OF_A_WEIGHT, WeightForm
from workers.engine.parallel.weight_cuts import Place
from workers.models.catalog import ModelFiles
from workers.process.handshake import DriverIdentity

CONTEXT = 260
"""Tokens of every sequence before the step. Not a multiple of a KV block: at such a position every
sequence begins a block, which few steps do.
"""
PREFILL_TOKENS = 512
"""Tokens of one sequence that one step prefills."""
REPEATS, QUICK_REPEATS = 12, 4
"""Steps of a row, of which the median counts."""
PEER_TOKENS, QUICK_PEER_TOKENS = 48, 32
"""Tokens that peers generate; fewer, and the noise of the prompt hides their time."""
SETTINGS = ((1, CORES), (1, 1), (2, 1))
"""The settings that are measured: number of shards, and threads of each."""
_MIB = 1024 * 1024
COPY_BYTES = 256 * 1024 * 1024
_COPY_ROUNDS = 7
STREAM_SECONDS = 600.0
"""Deadline of a stream with all its steps."""
_DESCRIBE_SECONDS = 30.0


def measure_steps(asked: Asked) -> Iterator[Row]:
    """Our rows for every setting, batch and window, then the peers' for every batch."""
    files = target_files(asked)
    sizes = model_bytes(files.folder, files.weights)
    asked.tell("steps: measuring a copy")
    bandwidths = {threads: copy_bandwidth(threads) for threads in range(1, CORES + 1)}
    runtime_bytes = runtime_memory()
    for degree, threads in SETTINGS:
        setting = shard_setting(files, degree=degree, threads=threads)
        asked.tell(f"steps: starting {degree} x {threads} threads")
        with running_target(setting, log_folder=asked.folder) as stream:
            bench = StepBench(stream, setting, sizes, bandwidths[degree * threads])
            made = bench.run(asked)
            memory = _memory(stream.pids, setting, sizes, runtime_bytes)
        yield from ({**row, **memory} for row in made)
    yield from _peer_rows(files, sizes, bandwidths, asked)


PARTS["steps"] = measure_steps


def shard_setting(files: ModelFiles, *, degree: int, threads: int) -> ShardSetting:
    """A target whose shards have enough KV memory for what is measured, in whole MiB.

    The rank with the most heads sets the size. Heads that do not divide are held twice.
    """
    num_blocks = max(
        max(BATCHES) * blocks_for(CONTEXT + 1 + max(WINDOWS), BLOCK_SIZE),
        blocks_for(PREFILL_TOKENS, BLOCK_SIZE),
    )
    per_block = max(
        block_bytes(
            **kv_sizes_of(part_config(files.folder, Place(rank, degree))),
            dtype=activation_dtype(files.weights),
        )
        for rank in range(degree)
    )
    return ShardSetting(files, degree, threads, 1 + num_blocks * per_block // _MIB)


class StepBench:
    def __init__(
        self, stream: TargetStream, setting: ShardSetting, sizes: ModelBytes, bandwidth: float
    ) -> None:
        """`bandwidth`: bytes per second of a copy with as many threads as all shards together."""
        self._stream = stream
        self._setting = setting
        self._sizes = sizes
        self._bandwidth = bandwidth
        self._opened = 0
        self._blocks_taken = 0

    def run(self, asked: Asked) -> list[Row]:
        repeats = QUICK_REPEATS if asked.quick else REPEATS
        prefill = self._prefill_rate(repeats)
        rows = []
        for batch in wanted_batches(asked, BATCHES):
            ids = [self._open(CONTEXT, room=1 + max(WINDOWS)) for _ in range(batch)]
            for window in WINDOWS:
                asked.tell(f"steps: {self._name(window)}, batch {batch}")
                rows.append(self._row(ids, window, repeats, prefill))
            self._close_all(ids)
        return rows

    def _row(self, ids: Sequence[int], window: int, repeats: int, prefill: float) -> Row:
        setting = self._setting
        self._decode(ids, window)  # warm up
        timed = [self._decode(ids, window) for _ in range(repeats)]
        seconds = statistics.median(wall for wall, _ in timed)
        read = self._sizes.of_step([CONTEXT + 1 + window] * len(ids))
        return {
            "part": "steps",
            "name": self._name(window),
            "engine": "paceline",
            "batch": len(ids),
            "window": window,
            "degree": setting.degree,
            "dtype": setting.files.weights,
            "threads": setting.threads,
            "step_ms": seconds * 1000,
            "bandwidth_share": read / seconds / self._bandwidth,
            "tokens_per_second": len(ids) / seconds,
            "speedup": None,
            "forward_ms": statistics.median(forward for _, forward in timed) * 1000,
            "context": CONTEXT,
            "prefill_tokens_per_second": prefill,
            "copy_gb_per_second": self._bandwidth / 1e9,
        }

    def _name(self, window: int) -> str:
        setting = self._setting
        return own_name(window=window, degree=setting.degree, threads=setting.threads)

    def _prefill_rate(self, repeats: int) -> float:
        """Tokens/s of a prompt that is fed in one step; the best of several."""
        seconds = []
        for _ in range(2 + repeats // 4):
            start = time.perf_counter()
            sequence_id = self._open(PREFILL_TOKENS, room=0)
            seconds.append(time.perf_counter() - start)
            self._close_all([sequence_id])
        return PREFILL_TOKENS / min(seconds)

    def _open(self, length: int, *, room: int) -> int:
        """Begin a sequence and feed its prompt in one step."""
        self._opened += 1
        sequence_id = self._opened
        first_block = self._blocks_taken
        self._blocks_taken += blocks_for(length + room, self._stream.description.block_size)
        spec = SequenceSpec(SamplingParams(temperature=0.0), seed=0, prompt_length=length)
        prompt = Slice(
            sequence_id,
            start=0,
            token_ids=self._tokens(length),
            window=0,
            verdict=True,
            new_blocks=tuple(range(first_block, self._blocks_taken)),
        )
        self._stream.step([prompt], opens=[OpenAtTarget(sequence_id, spec)])
        return sequence_id

    def _close_all(self, ids: Sequence[int]) -> None:
        self._stream.step((), closes=ids)
        self._blocks_taken = 0

    def _decode(self, ids: Sequence[int], window: int) -> tuple[float, float]:
        """Run a step. Returns its seconds as the sender measures them, and of its forward pass."""
        slices = [
            Slice(
                sequence_id,
                start=CONTEXT,
                token_ids=self._tokens(1 + window),
                window=window,
                verdict=True,
                new_blocks=(),
            )
            for sequence_id in ids
        ]
        start = time.perf_counter()
        response = self._stream.step(slices)
        return time.perf_counter() - start, response.forward_seconds

    def _tokens(self, count: int) -> tuple[int, ...]:
        vocab_size = self._stream.description.vocab_size
        return tuple(random_tokens(count, vocab_size=vocab_size, seed=self._opened))


def _memory(
    pids: Sequence[int], setting: ShardSetting, sizes: ModelBytes, runtime_bytes: int
) -> Mapping[str, object]:
    """The largest shard's peak memory, over the sum of its share of weights and its KV blocks."""
    peak = max(peak_memory(pid) for pid in pids) - runtime_bytes
    share = sizes.weights / setting.degree + setting.kv_memory_mib * _MIB
    return {"memory_mib": peak / _MIB, "share_mib": share / _MIB, "memory_ratio": peak / share}


def _peer_rows(
    files: ModelFiles, sizes: ModelBytes, bandwidths: Mapping[int, float], asked: Asked
) -> Iterator[Row]:
    """Peers' `generate` over a batch of prompts: transformers at its fastest thread count, and
    OpenVINO GenAI, if it is installed, at each of ours.
    """
    log = asked.folder / "transformers.log"
    dtype = peer_dtype(files.weights)
    bench = PeerBench(sizes, bandwidths, dtype, QUICK_PEER_TOKENS if asked.quick else PEER_TOKENS)
    with TransformersProcess(files.folder, dtype=dtype, threads=CORES, log=log) as peer:
        for batch in wanted_batches(asked, BATCHES):
            asked.tell(f"steps: transformers, batch {batch}")
            tried = []
            for threads in range(1, CORES + 1):
                generate = partial(peer.generate, threads=threads)
                tried.append(bench.row("hf", "transformers", batch, threads, generate))
            yield max(tried, key=lambda row: row["tokens_per_second"])
    if not openvino_peer.is_installed():
        return
    asked.tell("steps: converting for OpenVINO")
    converted = asked.folder / "openvino"
    openvino_peer.convert_checkpoints(
        [(files.folder, converted, "float32")], log=asked.folder / "openvino-convert.log"
    )
    for threads in (CORES, 1):
        log = asked.folder / f"openvino-{threads}.log"
        with openvino_peer.OpenVinoProcess(
            converted, threads=threads, log=log, dtype=dtype
        ) as openvino:
            for batch in wanted_batches(asked, BATCHES):
                asked.tell(f"steps: OpenVINO, {threads} threads, batch {batch}")
                name = "openvino" + (", 1 thread" if threads < CORES else "")
                yield bench.row(name, "openvino", batch, threads, openvino.generate)


@dataclass(frozen=True, slots=True)
class PeerBench:
    """`bandwidths`: of a copy, by threads. `tokens`: that peers generate."""

    sizes: ModelBytes
    bandwidths: Mapping[int, float]
    dtype: str
    tokens: int

    def row(
        self, name: str, engine: str, batch: int, threads: int, generate: Callable[..., Answer]
    ) -> Row:
        """The row of a peer. A step is the time that `generate` takes for one more token."""

        def seconds(num_prompts: int, length: int, max_tokens: int) -> float:
            prompts = [
                random_tokens(length, vocab_size=self.sizes.vocab_size, seed=number)
                for number in range(num_prompts)
            ]
            return generate(prompts, max_tokens=max_tokens, ignore_eos=True).seconds

        seconds(batch, CONTEXT, 2)  # warm up
        # The lesser of two times, since a hiccup of the host would make the difference absurd.
        first, whole = (
            min(seconds(batch, CONTEXT, 1 + more) for _ in range(2)) for more in (0, self.tokens)
        )
        step = (whole - first) / self.tokens
        read = self.sizes.of_step([CONTEXT + self.tokens // 2] * batch)
        return {
            "part": "steps",
            "name": name,
            "engine": engine,
            "batch": batch,
            "window": 0,
            "degree": 1,
            "dtype": self.dtype,
            "threads": threads,
            "step_ms": step * 1000,
            "bandwidth_share": read / step / self.bandwidths[threads],
            "tokens_per_second": batch / step,
            "speedup": None,
            "context": CONTEXT,
            "prefill_tokens_per_second": PREFILL_TOKENS / seconds(1, PREFILL_TOKENS, 1),
            "copy_gb_per_second": self.bandwidths[threads] / 1e9,
        }


# The shards


@dataclass(frozen=True, slots=True)
class ShardSetting:
    """How to run a target: `degree` shards of `threads` threads each."""

    files: ModelFiles
    degree: int
    threads: int
    kv_memory_mib: int


@contextmanager
def running_target(setting: ShardSetting, *, log_folder: Path) -> Iterator[TargetStream]:
    """Start the shards, yield a stream to them, end them. Raises UnavailableError."""
    with ExitStack() as stack:
        shards = []
        for rank in range(setting.degree):
            shards.append(_shard(setting, rank, log_folder / f"shard-{rank}.log"))
            stack.callback(shards[-1].end)
        addresses = [address for shard in shards for address in shard.addresses(1)]
        channels = [
            stack.enter_context(grpc.insecure_channel(address, options=client_options()))
            for address in addresses
        ]
        stream = TargetStream([target_pb2_grpc.TargetServiceStub(one) for one in channels])
        stack.callback(stream.end)
        yield stream


class TargetStream:
    """Sends a step to every shard and waits for rank 0."""

    def __init__(self, stubs: Sequence[target_pb2_grpc.TargetServiceStub]) -> None:
        """Let the shards meet, and open a stream to each."""
        request, identity = target_pb2.DescribeTargetRequest(), DriverIdentity()
        shards = [stub.DescribeTarget(request, timeout=_DESCRIBE_SECONDS) for stub in stubs]
        # A worker takes one stream with each number, and a meeting has one too.
        hellos = [
            partial(identity.hello, shard_name(rank, group=0), shard.life)
            for rank, shard in enumerate(shards)
        ]
        session = uuid.uuid4().hex
        meetings = [
            stub.Meet.future(
                target_pb2.MeetRequest(
                    session=session, rendezvous=shards[0].rendezvous, hello=hello()
                ),
                timeout=MEET_SECONDS,
            )
            for stub, hello in zip(stubs, hellos, strict=True)
        ]
        descriptions = [meeting.result().description for meeting in meetings]
        self.description = descriptions[0]
        self.pids = [description.pid for description in descriptions]
        self._outboxes: list[queue.SimpleQueue[target_pb2.StepRequest | None]] = []
        self._answers: list[Iterator[target_pb2.StepResponse]] = []
        self._last_step = 0
        for stub, hello in zip(stubs, hellos, strict=True):
            outbox: queue.SimpleQueue[target_pb2.StepRequest | None] = queue.SimpleQueue()
            outbox.put(target_pb2.StepRequest(hello=hello()))
            self._outboxes.append(outbox)
            self._answers.append(iter(stub.Step(iter(outbox.get, None), timeout=STREAM_SECONDS)))

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
        for outbox in self._outboxes:
            outbox.put(None)


def _shard(setting: ShardSetting, rank: int, log: Path) -> WorkerProcess:
    arguments = [
        *(str(setting.files.folder), "--weights", setting.files.weights),
        *("--threads", str(setting.threads), "--kv-memory-mib", str(setting.kv_memory_mib)),
        *("--max-model-len", str(PREFILL_TOKENS)),
        *("--rank", str(rank), "--degree", str(setting.degree)),
    ]
    return WorkerProcess("workers.target.shard", arguments, log=log, threads=setting.threads)


# Memory


def copy_bandwidth(threads: int, *, num_bytes: int = COPY_BYTES) -> float:
    """Bytes per second of a plain copy, reads and writes counted; the best of a few."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        source = torch.ones(num_bytes // 4, dtype=torch.float32)
        target = torch.zeros_like(source)
        seconds = []
        for _ in range(_COPY_ROUNDS):
            start = time.perf_counter()
            target.copy_(source)
            seconds.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return 2 * num_bytes / min(seconds)


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """Sizes of a model in bytes.

    `weights`: all weights. `read_a_step`: the weights of linear layers, which every step reads.
    `kv_a_token`: keys and values of one position in all layers.
    """

    weights: int
    read_a_step: int
    kv_a_token: int
    vocab_size: int

    def of_step(self, contexts: Sequence[int]) -> int:
        return self.read_a_step + self.kv_a_token * sum(contexts)


def model_bytes(folder: Path, weights: WeightForm) -> ModelBytes:
    """Sizes of a checkpoint with weights in the form `weights`. KV has the activations' dtype."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    each = BITS_OF_A_WEIGHT[weights] / 8
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    in_linears = sum(linear.weight.numel() for linear in linears)
    kv = kv_sizes_of(config)
    return ModelBytes(
        weights=int(sum(one.numel() for one in model.parameters()) * each),
        read_a_step=int(in_linears * each),
        kv_a_token=2
        * kv["num_layers"]
        * kv["num_heads"]
        * kv["head_size"]
        * activation_dtype(weights).itemsize,
        vocab_size=config.vocab_size,
    )


def peak_memory(pid: int) -> int:
    """The peak of a process's resident memory, in bytes."""
    return _status_bytes(Path(f"/proc/{pid}/status").read_text(encoding="utf-8"))


def runtime_memory() -> int:
    """Bytes that a shard's process holds before it loads: Python, torch and transformers."""
    program = "import workers.target.shard; print(open('/proc/self/status').read())"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return _status_bytes(done.stdout)


def _status_bytes(status: str) -> int:
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == "VmHWM":
            return int(value.split()[0]) * 1024
    raise AssertionError("/proc/PID/status names no VmHWM")

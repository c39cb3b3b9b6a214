"""Part "steps" of `bench engine`: how long a step takes, alone and beside transformers.

Steps go to shards in processes of their own over the Step stream, as the driver sends them, one
after another. Every step decodes or verifies for all sequences of the batch at the same context.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.decoding.instructions import OpenAtTarget, Slice
from deploy.bench.decode import CORES
from deploy.bench.engine_load import random_tokens
from deploy.bench.engine_memory import (
    ModelBytes,
    copy_bandwidth,
    model_bytes,
    peak_memory,
    runtime_memory,
)
from deploy.bench.engine_peer import PeerProcess
from deploy.bench.engine_rows import (
    BATCHES,
    WINDOWS,
    EngineRow,
    EngineTask,
    own_name,
    peer_dtype,
)
from deploy.bench.shard_process import ShardSetting, TargetStream, running_target
from paceline.sampling import SamplingParams, SequenceSpec
from workers.engine.block_pool import blocks_for
from workers.engine.kv_cache import BLOCK_SIZE, block_bytes
from workers.engine.kv_sizes import kv_sizes_of
from workers.engine.linears import activation_dtype
from workers.engine.model import part_config
from workers.engine.tensor_parallel.sharding import Place
from workers.models import ModelFiles

PART = "steps"
CONTEXT = 256
"""Tokens of every sequence before the step."""
PREFILL_TOKENS = 512
"""Of one sequence, in one step."""
SETTINGS = ((1, CORES), (1, 1), (2, 1))
"""Degrees, with the threads of a shard."""
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class StepAmount:
    """How much is measured of each row: steps, the median taken, and the peer's output tokens."""

    repeats: int
    peer_tokens: int


def measure_steps(task: EngineTask) -> Iterator[EngineRow]:
    """Rows of ours at every degree, batch and window, then transformers at every batch."""
    amount = StepAmount(4, 6) if task.quick else StepAmount(12, 16)
    files = task.target_files()
    sizes = model_bytes(files.folder, files.weights)
    task.tell("steps: measuring a copy")
    bandwidths = {threads: copy_bandwidth(threads) for threads in range(1, CORES + 1)}
    runtime_bytes = runtime_memory()
    for degree, threads in SETTINGS:
        setting = shard_setting(files, degree=degree, threads=threads)
        task.tell(f"steps: starting {degree} x {threads} threads")
        with running_target(setting, log_folder=task.log_folder) as stream:
            bench = StepBench(stream, setting, sizes, bandwidths[degree * threads])
            made = bench.run(amount, task)
            memory = _memory(stream.pids, setting, sizes, runtime_bytes)
        yield from (replace(row, details={**row.details, **memory}) for row in made)
    yield from _peer_rows(files, sizes, bandwidths, amount, task)


def shard_setting(files: ModelFiles, *, degree: int, threads: int) -> ShardSetting:
    """A target with KV memory for what is measured, in whole MiB a shard.

    It is what the rank with the most heads needs: those that do not divide are there twice.
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
    return ShardSetting(
        files.folder,
        files.weights,
        degree=degree,
        threads=threads,
        kv_memory_mib=1 + num_blocks * per_block // _MIB,
        max_model_len=PREFILL_TOKENS,
    )


class StepBench:
    """The rows of one target."""

    def __init__(
        self, stream: TargetStream, setting: ShardSetting, sizes: ModelBytes, bandwidth: float
    ) -> None:
        """`bandwidth`: of a copy with as many threads as all shards have, bytes a second."""
        self._stream = stream
        self._setting = setting
        self._sizes = sizes
        self._bandwidth = bandwidth
        self._opened = 0
        self._blocks_taken = 0

    def run(self, amount: StepAmount, task: EngineTask) -> list[EngineRow]:
        """Every batch and window."""
        prefill = self._prefill_rate(amount.repeats)
        rows = []
        for batch in task.batches_of(BATCHES):
            ids = [self._open(CONTEXT, room=1 + max(WINDOWS)) for _ in range(batch)]
            for window in WINDOWS:
                task.tell(f"steps: {self._name(window)}, batch {batch}")
                rows.append(self._row(ids, window, amount.repeats, prefill))
            self._close_all(ids)
        return rows

    def _row(self, ids: Sequence[int], window: int, repeats: int, prefill: float) -> EngineRow:
        setting = self._setting
        self._decode(ids, window)  # warm up
        timed = [self._decode(ids, window) for _ in range(repeats)]
        seconds = statistics.median(wall for wall, _ in timed)
        read = self._sizes.of_step([CONTEXT + 1 + window] * len(ids))
        return EngineRow(
            part=PART,
            name=self._name(window),
            engine="paceline",
            batch=len(ids),
            window=window,
            degree=setting.degree,
            dtype=setting.weights,
            threads=setting.threads,
            step_ms=seconds * 1000,
            bandwidth_share=read / seconds / self._bandwidth,
            tokens_per_second=len(ids) / seconds,
            details={
                "forward_ms": statistics.median(forward for _, forward in timed) * 1000,
                "context": CONTEXT,
                "prefill_tokens_per_second": prefill,
                "copy_gb_per_second": self._bandwidth / 1e9,
            },
        )

    def _name(self, window: int) -> str:
        setting = self._setting
        return own_name(window=window, degree=setting.degree, threads=setting.threads)

    def _prefill_rate(self, repeats: int) -> float:
        """Tokens a second of a prompt that comes in one step; the best of some."""
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
        """Seconds of a step as its sender sees it, and of its forward pass."""
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
    """The largest shard's peak memory against its share of weights and its KV blocks."""
    peak = max(peak_memory(pid) for pid in pids) - runtime_bytes
    share = sizes.weights / setting.degree + setting.kv_memory_mib * _MIB
    return {"memory_mib": peak / _MIB, "share_mib": share / _MIB, "memory_ratio": peak / share}


def _peer_rows(
    files: ModelFiles,
    sizes: ModelBytes,
    bandwidths: Mapping[int, float],
    amount: StepAmount,
    task: EngineTask,
) -> Iterator[EngineRow]:
    """transformers' generate over a batch of equal prompts, at the thread count it likes best."""
    log = task.log_folder / "transformers.log"
    with PeerProcess(files.folder, dtype=peer_dtype(files.weights), threads=CORES, log=log) as peer:
        for batch in task.batches_of(BATCHES):
            task.tell(f"steps: transformers, batch {batch}")
            tried = [
                _peer_row(peer, batch, threads, sizes, bandwidths[threads], amount)
                for threads in range(1, CORES + 1)
            ]
            yield max(tried, key=lambda row: row.tokens_per_second or 0.0)


def _peer_row(
    peer: PeerProcess,
    batch: int,
    threads: int,
    sizes: ModelBytes,
    bandwidth: float,
    amount: StepAmount,
) -> EngineRow:
    """A step is what `generate` takes for one more token."""

    def seconds(num_prompts: int, length: int, max_tokens: int) -> float:
        prompts = [
            random_tokens(length, vocab_size=sizes.vocab_size, seed=number)
            for number in range(num_prompts)
        ]
        return peer.static(prompts, max_tokens=max_tokens, threads=threads).seconds

    seconds(batch, CONTEXT, 2)  # warm up
    first = min(seconds(batch, CONTEXT, 1) for _ in range(2))
    step = (seconds(batch, CONTEXT, 1 + amount.peer_tokens) - first) / amount.peer_tokens
    context = CONTEXT + amount.peer_tokens // 2
    return EngineRow(
        part=PART,
        name="hf",
        engine="transformers",
        batch=batch,
        window=0,
        degree=1,
        dtype=peer.dtype,
        threads=threads,
        step_ms=step * 1000,
        bandwidth_share=sizes.of_step([context] * batch) / step / bandwidth,
        tokens_per_second=batch / step,
        details={
            "context": CONTEXT,
            "prefill_tokens_per_second": PREFILL_TOKENS / seconds(1, PREFILL_TOKENS, 1),
            "copy_gb_per_second": bandwidth / 1e9,
        },
    )

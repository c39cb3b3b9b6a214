"""Starts a target shard in a process of its own: loads its engine and serves it over gRPC."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import typer

from paceline.errors import ConfigError
from workers.engine.engine import Engine
from workers.engine.open import device_of, load_engine, open_engine
from workers.engine.options import (
    DEVICES,
    KV_DTYPES,
    WEIGHT_FORMS,
    Device,
    Dtype,
    KvDtype,
    UseKernels,
    WeightForm,
)
from workers.engine.parallel.group import Deadlines, RankGroup
from workers.engine.parallel.sharding import Progress
from workers.engine.parallel.weight_cuts import Place
from workers.process.mutual_tls import WorkerTls
from workers.process.server import RunningServer, start_server
from workers.process.standalone import (
    parse_choice,
    parse_cores,
    run_standalone,
)
from workers.process.threads import pin_cores
from workers.target.servicer import TargetShard
from workers.verification.grammars import Grammars

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TargetShardOptions:
    """What a shard loads, and on which device and cores it computes.

    `weights`: the form of the weights on a CPU if `dtype` is "auto". `kv_memory_bytes`: memory for
    KV blocks; None: open_engine chooses it. `max_model_len` None: the checkpoint's. `cores` None:
    the system chooses the cores. `device`: "cpu", "cuda" or "auto". `kv_dtype` (of stored keys and
    values), `batch_invariant` and `kernels` (whether our own kernels run) are for a GPU. `place`,
    `deadlines` and `interface` are for a tensor-parallel shard (RankGroup). `cache`: see CpuEngine.
    """

    folder: Path
    weights: WeightForm = "float32"
    threads: int = 1
    kv_memory_bytes: int | None = 256 * 1024 * 1024
    max_model_len: int | None = None
    cores: tuple[int, ...] | None = None
    device: Device = "cpu"
    dtype: Dtype = "auto"
    kv_dtype: KvDtype = "auto"
    batch_invariant: bool = True
    kernels: UseKernels = False
    place: Place = field(default_factory=Place)
    deadlines: Deadlines = field(default_factory=Deadlines)
    interface: str | None = None
    cache: Path | None = None


async def serve_target_shard(
    options: TargetShardOptions,
    *,
    host: str,
    port: int = 0,
    progress: Progress | None = None,
    tls: WorkerTls | None = None,
) -> RunningServer:
    """Listen, load the checkpoint in a thread, then report SERVING.

    `progress` is called in that thread while tensors are loaded; None: progress is logged. `tls`:
    see start_server. Raises UnavailableError if the port cannot be bound (before anything is
    loaded), ConfigError for cores that are not available, a rank out of range, or more shards than
    heads, CheckpointError if the checkpoint cannot be used.
    """
    if options.cores is not None:
        pin_cores(options.cores)
    shard, group = TargetShard(threads=options.threads), _group_of(options, host)

    async def load() -> None:
        engine = await load_target(options, group=group, progress=progress)
        grammars = None
        if not options.place.rank:  # It chooses all tokens.
            grammars = await asyncio.to_thread(
                Grammars,
                options.folder,
                vocab_size=engine.info.vocab_size,
                end_token_ids=engine.info.end_token_ids,
                clock=time.thread_time,
            )
        shard.begin(engine, grammars=grammars)

    server = await start_server(shard.add_to, host=host, port=port, serving=False, tls=tls)
    shard.on_broken = server.report_broken
    server.life = shard.reception.life
    shard.on_serving = lambda serving: server.report(serving=serving)
    await server.serve_after(load)
    return server


async def load_target(
    options: TargetShardOptions, *, group: RankGroup | None = None, progress: Progress | None = None
) -> Engine:
    """Load the engine of a shard in a thread. Raises ConfigError and CheckpointError."""
    opening = partial(
        open_engine,
        options.folder,
        weights=options.weights,
        threads=options.threads,
        cores=options.cores,
        kv_memory_bytes=options.kv_memory_bytes,
        max_model_len=options.max_model_len,
        device=options.device,
        dtype=options.dtype,
        kv_dtype=options.kv_dtype,
        batch_invariant=options.batch_invariant,
        kernels=options.kernels,
        group=group,
        progress=progress or _LoggedProgress(options.place),
        cache=options.cache,
    )
    return await load_engine(opening, threads=options.threads)


def _group_of(options: TargetShardOptions, host: str) -> RankGroup | None:
    place = options.place
    if not 0 <= place.rank < place.degree:
        raise ConfigError(f"rank: expected 0 to {place.degree - 1}, got {place.rank}")
    if place.degree == 1:
        return None
    device = device_of(options.device)
    return RankGroup(
        place,
        host=host,
        interface=options.interface,
        device=device,
        deadlines=options.deadlines,
    )


class _LoggedProgress:
    """Logs the progress of loading a shard's part of the checkpoint, at each tenth."""

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
    kv_cache_dtype: str = "auto",
    rank: int = 0,
    degree: int = 1,
    collective_seconds: float = 30.0,
    tls: Path | None = None,
) -> None:
    """Serve a target shard from this process, without Ray: for tests and for diagnosing faults.

    FOLDER is a checkpoint. Port 0 takes a free one; the address is printed once the shard serves.
    DEVICE is cpu, cuda or auto; KV_CACHE_DTYPE is auto or, on a GPU, fp8. For several shards of one
    target, DEGREE is their number and RANK counts from 0; COLLECTIVE_SECONDS is how long a shard
    waits for the others in a step. TLS is a folder with a worker's certificate (docs/security.md).
    """
    options = TargetShardOptions(
        folder=folder,
        weights=parse_choice("weights", weights, WEIGHT_FORMS),
        threads=threads,
        kv_memory_bytes=kv_memory_mib * 1024 * 1024,
        max_model_len=max_model_len,
        cores=parse_cores(cores),
        device=parse_choice("device", device, DEVICES),
        kv_dtype=parse_choice("kv-cache-dtype", kv_cache_dtype, KV_DTYPES),
        kernels="auto",
        place=Place(rank, degree),
        deadlines=Deadlines(collective=collective_seconds),
    )
    run_standalone(lambda: serve_target_shard(options, host=host, port=port, tls=WorkerTls.of(tls)))


if __name__ == "__main__":
    typer.run(main)

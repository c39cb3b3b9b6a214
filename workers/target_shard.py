"""A shard of the target as a process: what it loads and where, then its servicer."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

import typer

from paceline.errors import ConfigError
from workers.cores import pin_cores
from workers.engine.device import DEVICES, Device
from workers.engine.open import AnyEngine, device_of
from workers.engine.rank_parts import Progress
from workers.engine.tensor_parallel.group import Deadlines, Group
from workers.engine.tensor_parallel.sharding import Place
from workers.engine.weight_form import Dtype, WeightForm
from workers.kernels import use_kernels
from workers.loading import load_engine
from workers.server import RunningServer, start_server
from workers.standalone import (
    parse_choice,
    parse_cores,
    parse_weights,
    run_standalone,
)
from workers.target_servicer import TargetShard

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TargetShardOptions:
    """What a shard loads, and where it computes.

    `weights`: on a CPU, where `dtype` is "auto". `kv_memory_bytes`: for KV blocks; None: by the
    device (open_engine). `max_model_len` None: the checkpoint's. `cores` None: wherever the system
    puts its threads. `device`: "cpu", "cuda" or "auto"; `batch_invariant` and `kernels` (our own
    run): on a GPU. `place` and `deadlines`: of a tensor-parallel shard.
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
    kernels: bool = False
    place: Place = field(default_factory=Place)
    deadlines: Deadlines = field(default_factory=Deadlines)


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

    server = await start_server(shard.add_to, host=host, port=port, serving=False)
    shard.on_broken = server.report_broken
    shard.on_serving = lambda serving: server.report(serving=serving)
    await server.serve_once(load)
    return server


async def load_target(
    options: TargetShardOptions, *, group: Group | None = None, progress: Progress | None = None
) -> AnyEngine:
    """The engine of a shard, in a thread. Raises what serve_target_shard does but for the port."""
    if options.kernels:
        use_kernels(True)
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

"""A drafter in a process of its own: what it loads, and how its servicer starts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import ConfigError
from paceline.rules import DRAFTER_KINDS, DrafterKind
from workers.drafting.desk import DraftingDesk
from workers.drafting.kinds.ngram import NgramProposer
from workers.drafting.kinds.recycling import RecyclingProposer
from workers.drafting.proposer import Proposer
from workers.drafting.service import Drafter
from workers.engine.options import DEVICES, WEIGHT_FORMS, Device, WeightForm
from workers.process.server import RunningServer, start_server
from workers.process.settings import freeze_present_objects
from workers.process.standalone import parse_choice, parse_cores, run_standalone
from workers.process.threads import pin_cores


@dataclass(frozen=True, slots=True)
class DrafterOptions:
    """What a drafter loads, and where it computes.

    `folder`, `weights` ("float32" or "int8"), `threads`, `kv_memory_bytes` and `prefix_cache` are
    for kind "model" only. `kv_memory_bytes` None: as much as open_engine takes. `prefix_cache`:
    whether sequences of one tenant share the KV of equal prefixes. `device` is "cpu", "cuda" or
    "auto". `kernels`: whether a GPU runs our own kernels. `max_sequences` counts those of all
    streams together. `cores` None: the system chooses the cores.
    """

    kind: DrafterKind
    folder: Path | None = None
    weights: WeightForm = "int8"
    threads: int = 1
    kv_memory_bytes: int | None = 256 * 1024 * 1024
    max_sequences: int = 64
    cores: tuple[int, ...] | None = None
    device: Device = "cpu"
    kernels: bool = False
    prefix_cache: bool = True


async def serve_drafter(options: DrafterOptions, *, host: str, port: int = 0) -> RunningServer:
    """Listen, load the checkpoint (if any) in a thread, then report SERVING.

    Raises UnavailableError if the port cannot be bound (before anything is loaded), ConfigError for
    options that do not fit together, CheckpointError if the checkpoint cannot be used.
    """
    if options.cores is not None:
        pin_cores(options.cores)
    drafter, load_proposer = Drafter(), _loader_of(options.kind)

    async def load() -> None:
        drafter.begin(
            DraftingDesk(await load_proposer(options), max_sequences=options.max_sequences)
        )

    return await serve_once_loaded(drafter, load, host=host, port=port)


async def serve_once_loaded(
    drafter: Drafter, load: Callable[[], Awaitable[None]], *, host: str, port: int
) -> RunningServer:
    """Listen, run `load`, which starts the drafter, then report SERVING."""
    server = await start_server(drafter.add_to, host=host, port=port, serving=False)
    server.on_stop(drafter.end)
    drafter.on_broken = server.report_broken
    await server.serve_after(load)
    return server


def _loader_of(kind: DrafterKind) -> Callable[[DrafterOptions], Awaitable[Proposer]]:
    """The loader of a kind."""
    if kind == "model":
        return load_model_proposer
    proposer = NgramProposer if kind == "ngram" else RecyclingProposer

    async def make(options: DrafterOptions) -> Proposer:
        freeze_present_objects()
        return proposer()

    return make


async def load_model_proposer(options: DrafterOptions) -> Proposer:
    """Load a proposer of kind "model" in a thread. Raises ConfigError and CheckpointError."""
    from workers.drafting.kinds.model import ModelProposer
    from workers.engine.open import load_engine

    if options.folder is None:
        raise ConfigError('a drafter of kind "model" needs a checkpoint folder, got none')
    engine = await load_engine(
        options.folder,
        weights=options.weights,
        threads=options.threads,
        kv_memory_bytes=options.kv_memory_bytes,
        device=options.device,
        kernels=options.kernels,
    )
    return ModelProposer(engine, prefix_cache=options.prefix_cache)


def main(
    folder: Annotated[Path | None, typer.Argument()] = None,
    kind: str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    weights: str = "int8",
    threads: int = 1,
    kv_memory_mib: int = 256,
    max_sequences: int = 64,
    cores: str | None = None,
    device: str = "cpu",
    prefix_cache: bool = True,
) -> None:
    """Serve a drafter from this process, without Ray: for tests and for diagnosing faults.

    FOLDER is a checkpoint. KIND is model, ngram or recycling; the default is model with a folder
    and ngram without one. Port 0 takes a free one; the address is printed once the drafter serves.
    DEVICE is cpu, cuda or auto.
    """
    options = DrafterOptions(
        kind=parse_choice("kind", kind or ("ngram" if folder is None else "model"), DRAFTER_KINDS),
        folder=folder,
        weights=parse_choice("weights", weights, WEIGHT_FORMS),
        threads=threads,
        kv_memory_bytes=kv_memory_mib * 1024 * 1024,
        max_sequences=max_sequences,
        cores=parse_cores(cores),
        device=parse_choice("device", device, DEVICES),
        prefix_cache=prefix_cache,
    )
    run_standalone(lambda: serve_drafter(options, host=host, port=port))


if __name__ == "__main__":
    typer.run(main)

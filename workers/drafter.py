"""A drafter: what it loads, and its servicer (drafting_service.py) in a process of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from paceline.rules import DRAFTER_KINDS, DrafterKind
from workers.cores import pin_cores
from workers.drafting.desk import DraftingDesk
from workers.drafting.ngram import NgramProposer
from workers.drafting.proposer import Proposer
from workers.drafting.recycling import RecyclingProposer
from workers.drafting_service import Drafter
from workers.engine.device import DEVICES, Device
from workers.engine.weight_form import WeightForm
from workers.garbage import spare_what_is_there
from workers.server import RunningServer, start_server
from workers.standalone import parse_choice, parse_cores, parse_weights, run_standalone


@dataclass(frozen=True, slots=True)
class DrafterOptions:
    """What a drafter loads, and where it computes.

    `folder`, `weights` ("float32" or "int8"), `threads` and `kv_memory_bytes` are for kind "model"
    alone, `kv_memory_bytes` None meaning what open_engine takes, and so is `prefix_cache`: whether
    sequences of one tenant share KV of equal prefixes. `device` is "cpu", "cuda" or "auto";
    `kernels`: our own run on a GPU.
    `max_sequences`: of all streams together. `cores` None: wherever the system puts it.
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

    Raises UnavailableError when the port cannot be bound (before anything is loaded), ConfigError
    for options that do not fit, CheckpointError when the checkpoint cannot be used.
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
    """Listen, have `load` make the drafter begin, then report SERVING."""
    server = await start_server(drafter.add_to, host=host, port=port, serving=False)
    server.on_stop(drafter.end)
    drafter.on_broken = server.report_broken
    await server.serve_once(load)
    return server


def _loader_of(kind: DrafterKind) -> Callable[[DrafterOptions], Awaitable[Proposer]]:
    """How a kind is loaded. That of models takes seconds to import, which others do without."""
    if kind == "model":
        from workers.drafter_model import load_model_proposer

        return load_model_proposer
    proposer = NgramProposer if kind == "ngram" else RecyclingProposer

    async def make(options: DrafterOptions) -> Proposer:
        spare_what_is_there()
        return proposer()

    return make


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
    """Serve a drafter from this process, without Ray: for tests and for looking into faults.

    FOLDER is a checkpoint. KIND is model, ngram or recycling; left out, model with a folder and
    ngram without one. Port 0 takes a free one; the address is printed once it serves. DEVICE is
    cpu, cuda or auto.
    """
    options = DrafterOptions(
        kind=parse_choice("kind", kind or ("ngram" if folder is None else "model"), DRAFTER_KINDS),
        folder=folder,
        weights=parse_weights(weights),
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

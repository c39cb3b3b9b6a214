"""Starts a drafter in a process of its own: loads its proposer and serves it over gRPC."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated

import typer

from workers.drafting.desk import DraftingDesk
from workers.drafting.kind import DRAFTERS, DrafterOptions
from workers.drafting.kinds.model import MODEL, ModelOptions
from workers.drafting.service import Drafter
from workers.engine.options import DEVICES, WEIGHT_FORMS
from workers.models.catalog import default_home, resolve_model
from workers.process.mutual_tls import WorkerTls
from workers.process.server import RunningServer, start_server
from workers.process.settings import freeze_present_objects
from workers.process.standalone import (
    parse_choice,
    parse_cores,
    parse_labels,
    run_standalone,
)
from workers.process.threads import pin_cores


async def serve_drafter(
    options: DrafterOptions, *, host: str, port: int = 0, tls: WorkerTls | None = None
) -> RunningServer:
    """Listen, load the checkpoint (if any) in a thread, then report SERVING.

    `tls`: see start_server. Raises UnavailableError if the port cannot be bound (before anything is
    loaded), ConfigError for options that do not fit together, CheckpointError if the checkpoint
    cannot be used.
    """
    if options.cores is not None:
        pin_cores(options.cores)
    drafter, kind = Drafter(), DRAFTERS.get(options.kind, field="kind")
    drafter.labels = options.labels

    async def load() -> None:
        proposer = await kind.load(kind.with_defaults(options))
        freeze_present_objects()
        drafter.begin(DraftingDesk(proposer, max_sequences=options.max_sequences))

    return await serve_once_loaded(drafter, load, host=host, port=port, tls=tls)


async def serve_once_loaded(
    drafter: Drafter,
    load: Callable[[], Awaitable[None]],
    *,
    host: str,
    port: int,
    tls: WorkerTls | None = None,
) -> RunningServer:
    """Listen, run `load`, which starts the drafter, then report SERVING."""
    server = await start_server(drafter.add_to, host=host, port=port, serving=False, tls=tls)
    server.on_stop(drafter.end)
    drafter.on_broken = server.report_broken
    server.life = drafter.reception.life
    server.uses = drafter.uses
    await server.serve_after(load)
    return server


def main(
    model: Annotated[str | None, typer.Argument()] = None,
    kind: str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    weights: str | None = None,
    tokenizer: Path | None = None,
    threads: int = 1,
    kv_memory_mib: int | None = None,
    max_sequences: int = 64,
    cores: str | None = None,
    device: str = "cpu",
    prefix_cache: bool = True,
    tls: Path | None = None,
    label: list[str] | None = None,
) -> None:
    """Serve a drafter from this process, without Ray: in a pool, for tests, to diagnose faults.

    MODEL is a checkpoint's folder, or a model's name as in the configuration, which is fetched if
    it is absent. KIND is a registered kind; the default is model with a MODEL and ngram without.
    WEIGHTS are the form on a CPU; the default is what a named model has, and int8 for a folder.
    KV_MEMORY_MIB None: 1 GiB at most on a CPU, on a GPU what MAX_SEQUENCES may need.
    TOKENIZER is a folder with the target's tokenizer, for a model of another vocabulary.
    Port 0 takes a free one; the address is printed once the drafter serves. DEVICE is cpu, cuda or
    auto. TLS is a folder with a worker's certificate (docs/security.md). Each LABEL, such as
    zone=a, says where the drafter is (docs/drafter-pool.md).
    """
    files = None if model is None else resolve_model(model, home=default_home(os.environ))
    is_folder = model is None or Path(model).expanduser().is_dir()
    given = weights or ("int8" if files is None or is_folder else files.weights)
    kind = parse_choice("kind", kind or ("ngram" if model is None else "model"), tuple(DRAFTERS))
    if tokenizer is not None and kind != MODEL.name:
        raise typer.BadParameter(f'a drafter of kind "{kind}" has no tokenizer; expected "model"')
    options = DrafterOptions(
        kind=kind,
        folder=None if files is None else files.folder,
        weights=parse_choice("weights", given, WEIGHT_FORMS),
        threads=threads,
        kv_memory_bytes=None if kv_memory_mib is None else kv_memory_mib << 20,
        max_sequences=max_sequences,
        cores=parse_cores(cores),
        device=parse_choice("device", device, DEVICES),
        kernels="auto",
        prefix_cache=prefix_cache,
        labels=parse_labels(label or ()),
        of_kind=None if tokenizer is None else ModelOptions(tokenizer=tokenizer.absolute()),
    )
    run_standalone(lambda: serve_drafter(options, host=host, port=port, tls=WorkerTls.of(tls)))


if __name__ == "__main__":
    typer.run(main)

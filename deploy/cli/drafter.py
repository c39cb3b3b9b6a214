"""`paceline drafter`: serves one drafter in the foreground, for a pool or for vLLM."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer


@dataclass(frozen=True, slots=True)
class DrafterFlags:
    """What workers.drafting.drafter.main is told."""

    model: Annotated[
        str | None,
        typer.Argument(help="A checkpoint's folder, or a model's name. Default: no model."),
    ] = None
    kind: Annotated[
        str | None,
        typer.Option(help="Kind of drafter. Default: model, and ngram without a MODEL."),
    ] = None
    host: Annotated[str, typer.Option(help="Where to listen. 0.0.0.0: on all interfaces.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 9002
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="auto: a GPU if there is one.")
    ] = "auto"
    threads: Annotated[int, typer.Option(min=1, help="Threads on a CPU.")] = 1
    weights: Annotated[
        str | None,
        typer.Option(
            help="On a CPU: float32, bfloat16, int8 or int4. Default: as a named model has "
            "them, int8 for a folder. A GPU takes the checkpoint's."
        ),
    ] = None
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="A folder with the target's, for a model of another vocabulary."),
    ] = None
    max_sequences: Annotated[
        int, typer.Option(min=1, help="Sequences at a time. Further ones are declined.")
    ] = 64
    kv_memory_mib: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Memory for keys and values. Default: 1024 at most on a CPU, on a GPU for "
            "4,096 tokens of each of --max-sequences, if there is room.",
        ),
    ] = None
    prefix_cache: Annotated[
        bool, typer.Option(help="Share the KV of equal prefixes within a tenant.")
    ] = True
    tls: Annotated[
        Path | None,
        typer.Option(help="A folder with a worker's certificate. Default: plain text."),
    ] = None
    label: Annotated[
        list[str] | None, typer.Option(help="Where it is, such as zone=a. May be repeated.")
    ] = None


def drafter(flags: DrafterFlags) -> None:
    """Serve a drafter until SIGTERM or SIGINT. It prints its address once it serves."""
    from workers.drafting.drafter import main

    main(**asdict(flags))

"""Flags that several commands share, declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.address import parse_address
from workers.verification.rule import RULES


def check_server(address: str | None) -> str | None:
    """Refuse an address that is neither HOST:PORT nor [IPV6]:PORT, before anything starts."""
    if address is not None:
        parse_address(address, "server")
    return address


ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="TOML file; without it, the local demo.")
]
MaxTokensOption = Annotated[int, typer.Option(help="Maximum tokens of a row.")]
TemperatureOption = Annotated[
    float | None, typer.Option(help="0 is greedy. Default: the checkpoint's.")
]
TopKOption = Annotated[
    int | None, typer.Option(help="0 keeps all tokens. Default: the checkpoint's.")
]
TopPOption = Annotated[
    float | None, typer.Option(help="Above 0, at most 1. Default: the checkpoint's.")
]
SeedOption = Annotated[int, typer.Option(help="Row i uses seed + i.")]
VerificationOption = Annotated[
    str | None, typer.Option(help=f"A verification rule: {', '.join(RULES)}.")
]
BranchesOption = Annotated[
    int | None, typer.Option(help="Candidates at each position, 1 to 8. 1 drafts chains.")
]
StoppingOption = Annotated[
    str | None,
    typer.Option(help="When a drafter stops early: fixed (never), adaedl, confidence or cost."),
]
DrafterOption = Annotated[
    str | None, typer.Option(help="Kind of drafter: model, ngram or recycling.")
]
MergeOption = Annotated[
    bool | None,
    typer.Option("--merge/--no-merge", help="Have a drafter of each kind draft, in one tree."),
]
LimitOption = Annotated[int | None, typer.Option(help="Use only the first N rows.")]
QuietOption = Annotated[
    bool, typer.Option("--quiet", help="No progress on stderr. Failed rows are still named.")
]
ServerOption = Annotated[
    str | None,
    typer.Option(
        callback=check_server,
        help="HOST:PORT of an inference server. Default: the running cluster with the same "
        "configuration, else a private one that ends with the command.",
    ),
]
JsonOption = Annotated[
    Path | None, typer.Option("--json", help="Also write the figures to this file.")
]

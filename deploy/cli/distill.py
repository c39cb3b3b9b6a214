"""`paceline distill`: makes a drafter for a target."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from deploy.terminal.fetch_progress import show_fetch
from deploy.terminal.lines import plain, table_of, whole_table
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from workers.models.catalog import ModelFiles

ASKS_SHARE = 0.3
"""Share of the prompts for which the target invents a question."""
PASSES, CONTEXT = 20, 64
"""Passes that are timed for the report, after a text of this number of tokens."""


def distill(
    environ: Mapping[str, str],
    target: Annotated[str, typer.Argument(help="Checkpoint folder or name of the target.")],
    out: Annotated[Path, typer.Argument(help="Folder for the drafter's checkpoint.")],
    prompts: Annotated[
        Path, typer.Option(help="JSON lines, as `paceline generate --input` reads them.")
    ],
    hours: Annotated[
        float, typer.Option(min=0.0, help="Hours of sampling and training in all.")
    ] = 8.0,
    parallel: Annotated[
        bool, typer.Option(help="Train it to give several candidates a pass (PARD).")
    ] = False,
    layers: Annotated[int, typer.Option(help="Layers, copied from the target's.")] = 5,
    head: Annotated[int, typer.Option(help="Tokens that it proposes, the most frequent.")] = (
        16384
    ),
    length: Annotated[int, typer.Option(help="Tokens of a text; every fourth has twice.")] = 512,
    loss: Annotated[str, typer.Option(help="mixed, forward, reverse or variation.")] = "mixed",
    work: Annotated[
        Path | None, typer.Option(help="Folder to go on with. Default: OUT.work beside OUT.")
    ] = None,
) -> None:
    """Distill a drafter from a target: it samples answers, trains, and reports.

    Run the command again to go on after an interruption, or with more hours.
    """
    from workers.distillation.run import Distillation, Recipe
    from workers.models.catalog import default_home, resolve_model
    from workers.models.learned import assemble, read_learned
    from workers.process.atomic_files import replaced_folder

    console = Console(stderr=True)
    with show_fetch(console, target) as progress:
        files = resolve_model(target, home=default_home(environ), progress=progress)
    found, asks = _prompts(files.folder, prompts)
    seconds = 3600 * hours
    recipe = Recipe(
        sample_seconds=0.3 * seconds,
        train_seconds=(0.4 if parallel else 0.7) * seconds,
        parallel_seconds=0.3 * seconds if parallel else 0.0,
        layers=layers,
        head=head,
        num_positions=length,
        loss=loss,
    ).on_this_machine()
    work = work or out.with_name(f"{out.name}.work")
    run = Distillation(
        files.folder, work, recipe, _end_tokens(files.folder), lambda line: plain(console, line)
    )
    learned = run.run(found, asks)
    try:
        with replaced_folder(out) as into:
            assemble(files.folder, learned, into)
    except OSError as error:
        raise ConfigError(
            f"could not write {out}: {error}; free space, and run the command again"
        ) from error
    _report(Console(), files, out, read_learned(learned)[1])


def _prompts(folder: Path, path: Path) -> tuple[list[list[int]], list[bool]]:
    """The rows of a file as tokens, and as often heads of a question that the target invents.

    The first one closes such a question. Raises ConfigError for a malformed row.
    """
    from transformers import AutoTokenizer

    from deploy.rows.inputs import BadRow, read_rows

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def text_of(messages: Sequence[dict[str, str]]) -> str:
        return str(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        )

    def tokens_of(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    texts = []
    for row in read_rows(path):
        if isinstance(row, BadRow):
            raise ConfigError(row.message)
        if isinstance(row.input, str):
            texts.append(row.input)
        else:
            texts.append(text_of([{"role": m.role, "content": m.content} for m in row.input]))
    head, tail = texts[0], texts[0]
    num_asks = 0
    if tokenizer.chat_template:
        head, _, tail = text_of([{"role": "user", "content": "\0"}]).partition("\0")
        num_asks = round(len(texts) * ASKS_SHARE / (1 - ASKS_SHARE))
    found = [tail, *texts, *[head] * num_asks]
    asks = [False] * (1 + len(texts)) + [True] * num_asks
    return [tokens_of(text) for text in found], asks


def _end_tokens(folder: Path) -> tuple[int, ...]:
    from workers.engine.load.checkpoint import describe_checkpoint

    return describe_checkpoint(folder).end_token_ids


def _report(
    console: Console, files: ModelFiles, drafter: Path, description: Mapping[str, Any]
) -> None:
    """Acceptance by position, the time of a pass, and the speed-up to expect on this machine."""
    from cluster.simulation.closed_forms import best_lockstep_window, ideal_overlap, lockstep

    accepted = description["acceptance"]["greedy"]
    step_ms, draft_ms = (_pass_ms(one, drafts=one == drafter) for one in (files.folder, drafter))
    window = best_lockstep_window(accepted[0], step_ms=step_ms, draft_ms=draft_ms, rtt_ms=0)
    places = (str(place) for place in range(1, 1 + len(accepted)))
    table = table_of((), ("position", *places))
    table.add_row("accepted", *(f"{one:.2f}" for one in accepted))
    whole_table(console, table)
    for temperature, (overlap, *_) in description["acceptance"].items():
        if temperature != "greedy":
            plain(console, f"first candidate at temperature {temperature}: {overlap:.2f}")
    plain(console, f"a pass: {draft_ms:.1f} ms, of the target {step_ms:.1f} ms")
    gain = lockstep(accepted[0], window, step_ms=step_ms, draft_ms=draft_ms, rtt_ms=0)
    bound = ideal_overlap(accepted[0], step_ms=step_ms, draft_ms=draft_ms)
    plain(
        console,
        f"expected: {gain:.2f} times plain decoding in lockstep with a window of {window}, at "
        f"most {bound:.2f} with drafting ahead",
    )
    figures = {"accepted": accepted, "draft_ms": draft_ms, "step_ms": step_ms, "lockstep": gain}
    (drafter / "report.json").write_text(json.dumps(figures, indent=1) + "\n")


def _pass_ms(folder: Path, *, drafts: bool) -> float:
    """Median milliseconds of a pass over one token, in float32 or as stored on a GPU."""
    from workers.engine.open import open_engine
    from workers.engine.slices import Slice

    threads = len(os.sched_getaffinity(0))
    engine = open_engine(
        folder,
        weights="float32",
        threads=threads,
        kv_memory_bytes=256 << 20,
        drafts=drafts,
        max_model_len=4 * CONTEXT,
    )
    blocks = range(-(-4 * CONTEXT // engine.block_size))
    engine.step([Slice(blocks, 0, [1] * CONTEXT, 1)])
    times = []
    for place in range(CONTEXT, CONTEXT + PASSES):
        began = time.perf_counter()
        logits_TV = engine.step([Slice(blocks, place, [1], 1)])
        float(logits_TV[0, 0])
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)

"""Make a recording for emulated devices from real decoding of the demo pair.

    python -m deploy.bench.record_replay workers/emulated/recordings/demo.json

It decodes plainly and asks the drafter for its ranks of every token, given all tokens before, at
temperatures 0 and 1. Of many requests those are kept, in their order, whose acceptance together is
within 1 % of that of all.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Annotated

import typer

from cluster.text import TextCodec
from deploy.inputs import DEFAULT_INPUT, BadRow, read_rows
from paceline.generation import Message
from paceline.sampling import SamplingParams, SequenceSpec
from workers.emulated.recording import MAX_RANK, RecordedSequence, Recording
from workers.engine.engine import Engine, Slice
from workers.models import default_home, resolve_model
from workers.verification.coupled import choose_token
from workers.verification.draws import top_children

_CHUNK = 32
_PINNED = 0.01


def decode(engine: Engine, prompt: Sequence[int], spec: SequenceSpec, count: int) -> list[int]:
    """Plain decoding of `count` tokens, or up to an end token."""
    table = list(range(-(-(len(prompt) + count) // engine.block_size)))
    tokens, fed = list(prompt), 0
    while len(tokens) < len(prompt) + count:
        logits_TV = engine.step([Slice(table, fed, tokens[fed:], 1)])
        fed = len(tokens)
        tokens.append(choose_token(logits_TV[0], spec, tokens))
        if tokens[-1] in engine.info.end_token_ids:
            break
    return tokens[len(prompt) :]


def rank(
    engine: Engine, prompt: Sequence[int], output: Sequence[int], spec: SequenceSpec
) -> list[int]:
    """The place of each token of the output among the drafter's candidates for it."""
    tokens = [*prompt, *output]
    table = list(range(-(-len(tokens) // engine.block_size)))
    engine.step([Slice(table, 0, tokens[: len(prompt) - 1], 1)])
    ranks: list[int] = []
    for start in range(len(prompt) - 1, len(tokens) - 1, _CHUNK):
        fed = tokens[start : min(start + _CHUNK, len(tokens) - 1)]
        logits_TV = engine.step([Slice(table, start, fed, len(fed))])
        for row, logits_V in enumerate(logits_TV):
            prefix = tokens[: start + row + 1]
            best = top_children(logits_V, spec, prefix, MAX_RANK)
            truth = tokens[start + row + 1]
            ranks.append(best.index(truth) if truth in best else MAX_RANK)
    return ranks


def pinned(sequences: Sequence[RecordedSequence], keep: int) -> tuple[RecordedSequence, ...]:
    """`keep` sequences at each temperature whose acceptance is nearest to that of all."""
    kept: list[RecordedSequence] = []
    for temperature in dict.fromkeys(one.temperature for one in sequences):
        alike = [one for one in sequences if one.temperature == temperature]
        wanted = _acceptance(alike)
        best = min(combinations(alike, keep), key=lambda some: abs(_acceptance(some) - wanted))
        kept += best
    return tuple(kept)


def _acceptance(sequences: Sequence[RecordedSequence]) -> float:
    ranks = [one for sequence in sequences for one in sequence.ranks]
    return ranks.count(0) / len(ranks)


def main(
    path: Path,
    tokens: Annotated[int, typer.Option(help="Most tokens a request.")] = 160,
    requests: Annotated[int, typer.Option(help="Requests at each temperature.")] = 12,
    keep: Annotated[int, typer.Option(help="Of them kept, at each temperature.")] = 4,
) -> None:
    """Record the demo pair and write PATH."""
    home = default_home(os.environ)
    target, drafter = resolve_model("demo", home=home), resolve_model("demo-draft", home=home)
    codec = TextCodec(target.folder)
    memory = 400 * 1024 * 1024
    engine = Engine(target.folder, weights=target.weights, threads=1, kv_memory_bytes=memory)
    guesser = Engine(drafter.folder, weights=drafter.weights, threads=1, kv_memory_bytes=memory)
    prompts = []
    for row in read_rows(DEFAULT_INPUT, limit=requests):
        assert not isinstance(row, BadRow), row
        given = row.input
        if isinstance(given, str):
            prompts.append(codec.encode_prompt(given))
        else:
            prompts.append(codec.encode_messages([m for m in given if isinstance(m, Message)]))
    sequences = []
    for temperature in (0.0, 1.0):
        for seed, prompt in enumerate(prompts):
            spec = SequenceSpec(SamplingParams(temperature=temperature), seed, len(prompt))
            output = decode(engine, prompt, spec, tokens)
            ranks = rank(guesser, prompt, output, spec)
            sequences.append(
                RecordedSequence(
                    temperature=temperature,
                    seed=seed,
                    prompt=prompt,
                    output=tuple(output),
                    ranks=tuple(ranks),
                )
            )
            typer.echo(
                f"temperature {temperature:g}, request {seed}: {ranks.count(0)}/{len(ranks)}"
            )
    long_run = _acceptance(sequences)
    recording = Recording(
        target=f"demo, {target.weights}",
        drafter=f"demo-draft, {drafter.weights}",
        made=f"deploy.bench.record_replay on {platform.machine()}, {len(sequences)} requests",
        long_run_acceptance=long_run,
        long_run_tokens=sum(len(one.ranks) for one in sequences),
        sequences=pinned(sequences, keep),
    )
    off = abs(recording.acceptance / long_run - 1)
    if off > _PINNED:
        typer.echo(f"the kept sequences are {off:.1%} off the long run: record more", err=True)
        raise typer.Exit(1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(recording.model_dump_json() + "\n", encoding="utf-8")
    typer.echo(f"acceptance {recording.acceptance:.4f}, of all {long_run:.4f}")


if __name__ == "__main__":
    typer.run(main)

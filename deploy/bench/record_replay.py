"""Makes a recording for emulated devices from real decoding of the demo pair.

    python -m deploy.bench.record_replay

It decodes requests plainly at temperatures 0 and 1. For every output token it asks the drafter for
the token's rank, given all tokens before it. Of many requests it keeps a few, whose joint
acceptance is within 1 % of that of all. `paceline bench lookahead` makes the recording if there is
none.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from pathlib import Path

import typer

from cluster.driver.text import TextCodec
from deploy.rows.inputs import DEFAULT_INPUT, BadRow, read_rows
from paceline.chat import Message
from paceline.errors import UnavailableError
from paceline.sampling import SequenceSpec
from workers.emulated.replay_text import (
    MAX_RANK,
    RecordedSequence,
    Recording,
    load_recording,
    spec_of,
)
from workers.engine.cpu.engine import CpuEngine
from workers.engine.slices import Slice
from workers.models.catalog import default_home, resolve_model
from workers.verification.choice import choose_token
from workers.verification.draws import top_children

TEMPERATURES = (0.0, 1.0)
TOKENS, REQUESTS, KEPT = 160, 32, 3
"""The most tokens of a request, the requests at each temperature, and how many of them are kept."""
_CHUNK = 32
_PINNED = 0.01
_KV_BYTES = 400 * 1024 * 1024


def recording_path(home: Path) -> Path:
    """The path of the demo pair's recording."""
    return home / "recordings" / "demo.json"


def demo_recording(home: Path, *, tell: Callable[[str], None]) -> Recording:
    """The recording of the demo pair. If there is none, make it, which takes a minute."""
    path = recording_path(home)
    if not path.exists():
        write_recording(path, record_demo(home, tell=tell))
    return load_recording(path)


def record_demo(home: Path, *, tell: Callable[[str], None]) -> Recording:
    """Make the recording. Raises UnavailableError if the kept requests differ from the long run."""
    target, drafter = resolve_model("demo", home=home), resolve_model("demo-draft", home=home)
    tell("recording the demo pair: loading")
    engine = CpuEngine(target.folder, weights=target.weights, threads=1, kv_memory_bytes=_KV_BYTES)
    asked = [
        (prompt, spec_of(len(prompt), temperature, seed))
        for temperature in TEMPERATURES
        for seed, prompt in enumerate(_prompts(target.folder, REQUESTS))
    ]
    outputs: list[list[int]] = []
    for start in range(0, len(asked), _CHUNK):
        tell(f"recording the demo pair: {start} of {len(asked)} requests are decoded")
        outputs += decode(engine, asked[start : start + _CHUNK], TOKENS)
    del engine
    guesser = CpuEngine(
        drafter.folder, weights=drafter.weights, threads=1, kv_memory_bytes=_KV_BYTES
    )
    sequences = []
    for number, ((prompt, spec), output) in enumerate(zip(asked, outputs, strict=True)):
        tell(f"recording the demo pair: the drafter has ranked {number} of {len(asked)}")
        sequences.append(
            RecordedSequence(
                temperature=spec.sampling.temperature,
                seed=spec.seed,
                prompt=prompt,
                output=tuple(output),
                ranks=tuple(rank(guesser, prompt, output, spec)),
            )
        )
    made = f"deploy.bench.record_replay on {platform.machine()}, {len(sequences)} requests"
    recording = Recording(
        target=f"demo, {target.weights}",
        drafter=f"demo-draft, {drafter.weights}",
        made=made,
        long_run_acceptance=_acceptance(sequences),
        long_run_tokens=sum(len(one.ranks) for one in sequences),
        sequences=pinned(sequences, KEPT),
    )
    off = abs(recording.acceptance / recording.long_run_acceptance - 1)
    if off > _PINNED:
        raise UnavailableError(f"the kept sequences are {off:.1%} off the long run: record more")
    return recording


def write_recording(path: Path, recording: Recording) -> None:
    """Write the recording, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(recording.model_dump_json() + "\n", encoding="utf-8")
    partial.replace(path)


def decode(
    engine: CpuEngine, asked: Sequence[tuple[Sequence[int], SequenceSpec]], count: int
) -> list[list[int]]:
    """Decode `count` tokens of each request, or up to an end token, in one batch, plainly."""
    blocks = [-(-(len(prompt) + count) // engine.block_size) for prompt, _ in asked]
    tables = [
        list(range(sum(blocks[:place]), sum(blocks[: place + 1]))) for place in range(len(blocks))
    ]
    tokens = [list(prompt) for prompt, _ in asked]
    fed = [0] * len(asked)
    open_ = list(range(len(asked)))
    for place in open_:  # one prompt at a time: together they would not fit into a step
        engine.step([Slice(tables[place], 0, tokens[place][:-1], 1)])
        fed[place] = len(tokens[place]) - 1
    while open_:
        logits_BV = engine.step(
            [Slice(tables[place], fed[place], tokens[place][fed[place] :], 1) for place in open_]
        )
        for row, place in enumerate(open_):
            fed[place] = len(tokens[place])
            tokens[place].append(choose_token(logits_BV[row], asked[place][1], tokens[place]))
        open_ = [
            place
            for place in open_
            if len(tokens[place]) < len(asked[place][0]) + count
            and tokens[place][-1] not in engine.info.end_token_ids
        ]
    return [all_[len(prompt) :] for all_, (prompt, _) in zip(tokens, asked, strict=True)]


def rank(
    engine: CpuEngine, prompt: Sequence[int], output: Sequence[int], spec: SequenceSpec
) -> list[int]:
    """The rank of each output token among the drafter's candidates for its position."""
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
    """The `keep` sequences at each temperature whose joint acceptance is nearest to that of all."""
    found: list[RecordedSequence] = []
    for temperature in dict.fromkeys(one.temperature for one in sequences):
        alike = [one for one in sequences if one.temperature == temperature]
        wanted = _acceptance(alike)
        long_enough = [one for one in alike if len(one.output) == max(len(o.output) for o in alike)]
        some = long_enough if len(long_enough) >= keep else alike
        found += min(combinations(some, keep), key=lambda kept: abs(_acceptance(kept) - wanted))
    return tuple(found)


def _acceptance(sequences: Iterable[RecordedSequence]) -> float:
    ranks = [one for sequence in sequences for one in sequence.ranks]
    return ranks.count(0) / len(ranks)


def _prompts(folder: Path, count: int) -> list[tuple[int, ...]]:
    codec = TextCodec(folder)
    found = []
    for row in read_rows(DEFAULT_INPUT, limit=count):
        assert not isinstance(row, BadRow), row
        if isinstance(row.input, str):
            found.append(codec.encode_prompt(row.input))
        else:
            found.append(codec.encode_messages([m for m in row.input if isinstance(m, Message)]))
    return found


if __name__ == "__main__":
    home = default_home(os.environ)
    recording = record_demo(home, tell=typer.echo)
    write_recording(recording_path(home), recording)
    typer.echo(
        f"{recording_path(home)}: acceptance {recording.acceptance:.4f} over "
        f"{sum(len(one.ranks) for one in recording.sequences)} tokens, "
        f"{recording.long_run_acceptance:.4f} over {recording.long_run_tokens}"
    )

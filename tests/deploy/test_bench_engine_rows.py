"""`paceline bench engine`: its load, what it counts, its rows and report."""

from __future__ import annotations

import io
import os
from dataclasses import replace

from rich.console import Console

from deploy.bench.engine_load import batches_of, seeded_requests
from deploy.bench.engine_memory import (
    copy_bandwidth,
    peak_memory,
    runtime_memory,
)
from deploy.bench.engine_report import engine_json, goals, print_engine
from deploy.bench.engine_rows import (
    WINDOWS,
    EngineRow,
    own_name,
    with_speedups,
)

EVERY_ROW = {
    *("name", "speedup", "engine", "batch", "window", "degree", "dtype", "threads"),
    *("step_ms", "bandwidth_share", "tokens_per_second"),
}


def served_row(name: str, batch: int, speed: float | None) -> EngineRow:
    engine = "transformers" if name.startswith("hf") else "paceline"
    return EngineRow("serving", name, engine, batch, 0, 1, "float32", 2, 10.0, None, speed)


RUN = (
    replace(served_row("off", 1, 50.0), part="steps", bandwidth_share=0.5),
    served_row("off", 1, 40.0),
    served_row("hf", 1, 20.0),
    served_row("off", 16, 200.0),
    served_row("off, 1 thread", 16, 150.0),
    served_row("hf", 16, 50.0),
    served_row("hf-continuous", 16, None),
)


def test_the_load_is_seeded_and_covers_its_range() -> None:
    requests = seeded_requests(2000, vocab_size=300, seed=7)
    assert requests == seeded_requests(2000, vocab_size=300, seed=7)
    assert requests != seeded_requests(2000, vocab_size=300, seed=8)
    prompts = {len(request.prompt_token_ids) for request in requests}
    outputs = {request.output_tokens for request in requests}
    assert (min(prompts), max(prompts)) == (20, 600)
    assert (min(outputs), max(outputs)) == (16, 256)
    assert len({request.prompt_token_ids[:20] for request in requests}) == 2000
    assert [len(group) for group in batches_of(requests[:9], 4)] == [4, 4, 1]


def test_a_copy_has_a_bandwidth() -> None:
    assert copy_bandwidth(1, num_bytes=1 << 20) > 0


def test_memory_of_a_process_is_its_peak() -> None:
    before = peak_memory(os.getpid())
    held = b"1" * (64 << 20)
    assert peak_memory(os.getpid()) >= before
    assert peak_memory(os.getpid()) > len(held)
    assert runtime_memory() > 50 << 20


def test_speedups_are_against_plain_decoding_of_the_same_part_and_batch() -> None:
    rows = with_speedups(RUN)
    assert [row.speedup for row in rows] == [1, 1, 0.5, 1, 0.75, 0.25, None]
    assert with_speedups(RUN[2:3])[0].speedup is None
    found = {goal.name: (goal.ratio, goal.aim) for goal in goals(rows)}
    assert found == {
        "batch 1: off / hf": (2.0, 2.0),
        "batch 16: off / hf": (4.0, 3.0),
        "batch 16: off, 1 thread / hf": (3.0, 3.0),
    }
    assert list(goals(RUN[:1])) == []


def test_rows_of_ours_are_named_apart() -> None:
    names = {
        own_name(window=window, degree=degree, threads=threads)
        for window in WINDOWS
        for degree, threads in ((1, 2), (1, 1), (2, 1))
    }
    assert len(names) == 9
    assert own_name(window=0, degree=1, threads=2) == "off"


def test_the_report_is_narrow_and_has_every_row() -> None:
    stream = io.StringIO()
    print_engine(Console(file=stream, width=80), with_speedups(RUN))
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "batch 16: off / hf = 4.00 (aim 3)" in lines
    assert any("hf-continuous" in line for line in lines)
    report = engine_json(RUN, {"cores": 2}, {"delay": "UnavailableError: no"})
    assert report["failed"] == {"delay": "UnavailableError: no"}
    assert (report["suite"], report["emulated"]) == ("engine", False)
    rows = report["rows"]
    assert isinstance(rows, list)
    assert all(row.keys() >= EVERY_ROW for row in rows)

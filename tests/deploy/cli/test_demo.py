"""`paceline demo`: an answer and a table that are readable with and without a terminal."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from deploy.bench.lookahead import emulated_gain
from deploy.cli.demo import (
    PLAIN,
    Way,
    comparison_table,
    gained,
    nothing_pays,
    picture,
    ways,
    where_measured,
)
from deploy.cli.trace import TraceFile
from deploy.rows.measure import Sample, busy_shares
from deploy.terminal.token_printer import TokenPrinter
from paceline.generation import Chunk, Origin, Stats, WorkerStats
from tests.deploy.conftest import Call, Served

ESCAPE = "\x1b"


def printed(chunks: list[Chunk], *, terminal: bool, width: int = 80) -> str:
    stream = io.StringIO()
    console = Console(
        file=stream,
        force_terminal=terminal,
        width=width,
        color_system="standard" if terminal else None,
    )
    printer = TokenPrinter(console)
    for chunk in chunks:
        printer.add(chunk)
    printer.close()
    return stream.getvalue()


def chunk(*pieces: tuple[str, Origin]) -> Chunk:
    return Chunk(
        offset=0,
        token_ids=tuple(range(len(pieces))),
        origins=tuple(origin for _, origin in pieces),
        text="".join(piece for piece, _ in pieces),
        pieces=tuple(piece for piece, _ in pieces),
    )


def test_demo_answers_and_compares_without_a_terminal(call: Call, served: Served) -> None:
    done = call(
        *("demo", "--server", served.address, "--config", served.config, "--no-emulated"),
        *("--max-tokens", 16, "--prompt", "What is a train?"),
    )
    assert done.code == 0, done.stderr
    assert ESCAPE not in done.stdout + done.stderr
    assert "Q: What is a train?" in done.stdout
    assert "plain decoding" in done.stdout
    assert "with model" in done.stdout
    pays, loses = "the same tokens" in done.stdout, "No drafter pays" in done.stdout
    assert pays != loses, "a race that was won, or no race"
    assert "paceline plan" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.timing
async def test_the_emulated_pair_gains_and_overlaps() -> None:
    file, told = TraceFile(), list[str]()
    gain = await emulated_gain(24, tell=told.append, on_round=file.add)
    assert gain.same_text
    assert gain.times > 1.5, "4 in the long run"
    assert gained(gain).startswith("EMULATED: ")
    target, marks, drafter, said = (line.plain for line in picture(file.rounds))
    assert target.startswith("target ")
    assert "+" in marks
    assert drafter.startswith("drafter ")
    assert {*drafter[9:]} >= {"\u2588", "\u2593"}, "several passes"
    together = int(re.search(r"(\d+)%", said)[1])  # type: ignore[index]
    assert together > 50
    assert max(map(len, (target, marks, drafter))) <= 80


def test_a_trace_without_passes_has_no_picture() -> None:
    step = {"step": 1, "end": 2.0, "seconds": 1.0, "windows": [{"committed": 1}]}
    assert list(picture([step, step, step])) == []
    assert list(picture([])) == []


def test_a_model_drafts_beside_the_target_or_in_turns_with_it() -> None:
    assert ways(["model", "ngram", "model", "suffix"]) == [
        PLAIN,
        Way("chain", "model"),
        Way("lockstep", "model"),
        Way("lockstep", "ngram"),
        Way("lockstep", "suffix"),
    ]


def test_an_empty_prompt_is_refused(call: Call) -> None:
    done = call("demo", "--server", "127.0.0.1:1", "--prompt", "")
    assert done.code == 2
    assert "prompt" in done.stderr


def test_accepted_drafts_have_a_color_of_their_own_on_a_terminal_only() -> None:
    chunks = [chunk(("The", "target"), (" sea", "draft")), chunk((" is", "draft"), (".", "target"))]
    assert printed(chunks, terminal=False) == "The sea is.\n"
    shown = printed(chunks, terminal=True)
    assert f"{ESCAPE}[32msea" in shown
    assert f"{ESCAPE}[1;33mThe" in shown


def test_lines_break_at_words_and_keep_their_own_breaks() -> None:
    words = [chunk((f" word{number:02}", "draft")) for number in range(20)]
    text = printed([chunk(("One\n", "target")), *words], terminal=False, width=30)
    assert text.splitlines()[0] == "One"
    assert max(map(len, text.splitlines())) <= 30
    assert text.split() == ["One", *(f"word{number:02}" for number in range(20))]


def test_control_characters_of_a_model_do_not_reach_the_terminal() -> None:
    assert printed([chunk((f"a{ESCAPE}[2J", "draft"), ("b\x07", "target"))], terminal=False) == (
        "a[2Jb\n"
    )


def test_text_at_the_very_end_has_no_pieces() -> None:
    rest = Chunk(offset=1, token_ids=(), origins=(), text=" end", pieces=())
    assert printed([chunk(("The", "draft")), rest], terminal=False) == "The end\n"


def test_the_table_shows_ratio_acceptance_and_busy_shares() -> None:
    stream = io.StringIO()
    busy = {"shard-0": 0.95, "drafter-0": 0.5, "drafter-1": 0.0}
    samples = {
        PLAIN: [Sample(tuple(range(10)), seconds, 10, busy) for seconds in (1.0, 2.0, 9.0)],
        Way("chain", "model"): [Sample(tuple(range(10)), 1.0, 4, busy)],
    }
    Console(file=stream, width=80).print(comparison_table(samples))
    rows = [line.split() for line in stream.getvalue().splitlines()]
    assert rows[1] == ["plain", "decoding", "5.0", "1.00", "1.00", "95%", "50%"]
    assert rows[2] == ["chain", "with", "model", "10.0", "2.00", "2.50", "95%", "50%"]


def test_what_does_not_pay_is_told_with_what_was_tried() -> None:
    told = nothing_pays({PLAIN: 40.0, Way("chain", "model"): 30.0, Way("lockstep", "ngram"): 38.0})
    assert "plain decoding makes 40.0 tokens/s" in told
    assert "chain with model 0.75, lockstep with ngram 0.95" in told


def test_busy_shares_are_differences_of_two_readings() -> None:
    def stats(uptime: float, busy: float) -> Stats:
        worker = WorkerStats("shard-0", "target", "here:1", 1, True, busy, 0, 0, 0)
        return Stats(uptime, 0, 0, 0, 0, 0, 0, 0, 0.0, (worker,))

    assert busy_shares(stats(10.0, 4.0), stats(14.0, 7.0)) == {"shard-0": pytest.approx(0.75)}


def test_emulated_devices_are_named_as_such() -> None:
    assert where_measured("demo") == "this machine's processor"
    assert where_measured("emulated 70b-4xh100") == "EMULATED devices (70b-4xh100)"

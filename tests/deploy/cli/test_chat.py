"""`paceline chat` and `paceline top`."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from deploy.cli.chat import told
from deploy.cli.status import devices, lines, screen
from paceline import Client, Message, RequestStats, SpeculationStats, Stats, WorkerLife, WorkerStats
from paceline.options import GenerateOptions
from tests.deploy.conftest import Call, Served


def test_a_chat_remembers_what_was_said(
    call: Call, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = GenerateOptions(seed=5, max_tokens=6)
    with Client(served.address) as client:
        first = [Message("user", "Tell me of the sea.")]
        one = client.generate(first, options).text
        second = [*first, Message("assistant", one), Message("user", "And the wind?")]
        two = client.generate(second, options).text
        anew = client.generate([Message("user", "And the wind?")], options).text
    assert two != anew
    said = "Tell me of the sea.\nAnd the wind?\n/clear\nAnd the wind?\n\n/exit\nnot read\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(said))
    done = call("chat", "--server", served.address, "--seed", 5, "--max-tokens", 6)
    assert done.code == 0, done.stderr
    printed = printable(done.stdout)
    for text in (one, two, anew):
        assert printable(text) in printed
    assert len(re.findall(r"6 tokens in .* tokens a step, accepted", done.stdout)) == 3


def printable(text: str) -> str:
    """The text without what a terminal shows as space, or not at all."""
    return re.sub(r"[\x00-\x20\x7f-\x9f\s]", "", text)


def test_a_line_that_is_refused_ends_no_chat(
    call: Call, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("word " * 4000 + "\nshort\n"))
    done = call("chat", "--server", served.address, "--max-tokens", 3)
    assert done.code == 0, done.stderr
    assert "error: " in done.stdout
    assert "3 tokens in" in done.stdout


def test_the_line_below_an_answer() -> None:
    stats = RequestStats(4, 8, 6, 2.5, 0.5, 0.02)
    line = "10 tokens in 0.50 s, first after 20 ms; 2.50 tokens a step, accepted 75% of 8 drafted"
    assert told(stats, 10) == line
    assert "accepted none of 0" in told(replace(stats, drafted=0, accepted=0), 10)


WORKERS = (
    WorkerStats("shard-0", "target", "h:1", 1, True, 10.0, 100, 400, 0),
    WorkerStats("drafter-0", "model", "h:2", 2, True, 2.0, 50, 200, 0),
)
BEFORE = Stats(
    *(100.0, 100, 300, 200, 150, 3, 1, 0, 0.1, WORKERS), verdicts=100, kv_blocks=8, kv_blocks_held=2
)


def test_top_shows_what_happened_between_two_looks() -> None:
    now = replace(
        BEFORE,
        uptime_seconds=102.0,
        committed_tokens=400,
        verdicts=140,
        drafted=300,
        accepted=225,
        workers=(
            replace(WORKERS[0], busy_seconds=11.5, passes=140),
            replace(WORKERS[1], connected=False, away_seconds=1.0),
        ),
        lives=(WorkerLife("drafter-0", 3),),
        speculation=SpeculationStats(
            tried_at=(10,), accepted_at=(8,), target_idle=0.05, choices={"off": 1, "chain": 3}
        ),
    )
    said = "\n".join(lines("m at h:3", BEFORE, now))
    for part in (
        "m at h:3, up 102 s",
        "1 running, 0 waiting, 3 finished; KV held 25%",
        "50.0 tokens/s, 2.50 a step and sequence, accepted 75% of drafts",
        "accepted:  by position 80%",
        "idle:      target 5%, drafters none of the time with work",
        "auto:      chain 75%, off 25%",
    ):
        assert part in said
    shown = io.StringIO()
    Console(width=120, file=shown).print(devices(BEFORE, now))
    _, target, drafter = shown.getvalue().splitlines()
    assert target.split()[:3] == ["shard-0", "target", "up"]
    assert target.split()[-4:] == ["75%", "20.0", "0.0", "0"]
    assert "lost 1 s" in drafter
    assert drafter.split()[-4:] == ["0%", "0.0", "0.0", "3"]


@pytest.mark.parametrize("width", [80, 60])
def test_no_line_of_top_breaks(width: int) -> None:
    """With the largest figures that a server is likely to have."""
    policies = ("lockstep", "chain-tree", "fanout-tree", "replicas", "spread", "off")
    crowded = replace(
        BEFORE,
        uptime_seconds=200_000.0,
        committed_tokens=4_000_000_000,
        verdicts=2_000_000_000,
        drafted=2_000_000,
        accepted=2_000_000,
        requests_finished=10_000_000,
        sequences_running=1024,
        sequences_waiting=1024,
        workers=(
            *(replace(WORKERS[0], name=f"shard-{n}") for n in range(8)),
            replace(
                WORKERS[1], name="drafter-10", kind="recycling", connected=False, away_seconds=100.0
            ),
        ),
        lives=(WorkerLife("drafter-10", 3),),
        speculation=SpeculationStats(
            tried_at=(10,) * 16,
            accepted_at=(10,) * 16,
            target_idle=1.0,
            drafter_idle=1.0,
            choices=dict.fromkeys(policies, 1000),
        ),
    )
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(
        screen(console, "meta-llama/Llama-3.3-70B-Instruct at 127.0.0.1:8001", BEFORE, crowded)
    )
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue().splitlines()
    assert len(shown) == 6 + 1 + 1 + len(crowded.workers)
    assert all(len(line) <= width for line in shown)
    assert ("…" in "".join(shown)) == (width < 80)
    assert "drafter-10" in shown[-1]
    assert "lost 100 s" in shown[-1]


def test_without_a_terminal_top_looks_once(call: Call, served: Served) -> None:
    done = call("top", "--server", served.address, "--interval", 0.1)
    assert done.code == 0, done.stderr
    assert "sequences: 0 running" in done.stdout
    assert re.search(r"(?m)^shard-0 +target +up ", done.stdout)
    assert call("top", "--server", served.address, "--interval", 0).code == 2

"""`paceline bench faults`: what its rows count, and a short run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.bench.faults import FAULTS, HTTP, Fault, Run, Stream, failures, row_of, wrong_of
from tests.deploy.shell import Shell

WANTED = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


def stream_of(token_ids: list[int], *times: float, error: str = "") -> Stream:
    return Stream(list(token_ids), list(times), error)


def test_answers_are_lost_repeated_or_changed() -> None:
    same = [stream_of(one) for one in WANTED]
    assert wrong_of(same, WANTED) == {"lost": 0, "repeated": 0, "changed": 0}
    wrong = [stream_of([1, 2]), stream_of([4, 5, 5, 6]), stream_of([7, 9, 8])]
    assert wrong_of(wrong, WANTED) == {"lost": 1, "repeated": 1, "changed": 1}
    broken = [stream_of([9, 9, 9, 9], error="gone"), *same[1:]]
    assert wrong_of(broken, WANTED) == {"lost": 1, "repeated": 0, "changed": 0}


def test_a_pause_is_the_longest_that_ends_after_the_fault() -> None:
    stream = stream_of([], 0.0, 5.0, 6.0, 8.0, 8.5)
    assert stream.pause_after(0.0) == 5.0
    assert stream.pause_after(5.5) == 2.0
    assert stream.pause_after(4.0) == 5.0  # It was going on when the fault came.
    assert stream.pause_after(9.0) == 0.0


def run_of(pause: float, back: float | None = 1.0) -> Run:
    streams = [stream_of(one, 0.0, 1.0, 1.0 + pause) for one in WANTED]
    return Run(streams, fault_at=0.5, back_seconds=back)


@pytest.mark.parametrize(
    ("fault", "pause", "back", "met"),
    [
        (Fault("x killed", 5.0, actor="X", worker="x"), 7.9, 1.0, True),
        (Fault("x killed", 5.0, actor="X", worker="x"), 8.1, 1.0, False),
        (Fault("x killed", 0.0, actor="X"), 1.54, 1.0, True),  # The undisturbed run had 1.5.
        (Fault("x killed", 0.0, actor="X"), 1.56, 1.0, False),
        (Fault("x cut", 2.0, back_bar=15.0, cut_seconds=1.0), 1.9, 14.0, True),
        (Fault("x cut", 2.0, back_bar=15.0, cut_seconds=1.0), 1.9, 16.0, False),
        (Fault("x cut", 2.0, back_bar=15.0, cut_seconds=1.0), 1.9, None, False),
        (Fault("x killed", actor="X", way=HTTP), 99.0, 1.0, None),
    ],
)
def test_a_bar_counts_the_start_of_its_worker_and_the_worst_run(
    fault: Fault, pause: float, back: float | None, met: bool | None
) -> None:
    start = 3.0 if fault.worker else 0.0
    row = row_of(fault, [run_of(1.0), run_of(pause, back)], WANTED, start, 1.5)
    assert row["met"] is met
    assert row["longest_pause_seconds"] == pytest.approx(max(pause, 1.0))
    assert bool(failures([row])) == (back is None)


def test_wrong_answers_and_what_is_not_back_fail_the_run() -> None:
    run = run_of(1.0)
    run.streams[0].token_ids.pop()
    fault = Fault("x killed", 5.0, actor="X")
    assert failures([row_of(fault, [run], WANTED, 0.0, 1.0)]) == ["x killed (gRPC): 1 lost"]
    gone = row_of(fault, [run_of(1.0, None)], WANTED, 0.0, 1.0)
    assert failures([gone]) == ["x killed (gRPC): not back in time"]


def test_every_row_has_a_part() -> None:
    parts = [fault.part for fault in FAULTS]
    assert {"drafter", "link", "host", "shard", "driver", "gateway", "controller", "head"} <= {
        *parts
    }


@pytest.mark.ray
@pytest.mark.release
def test_a_short_run_loses_nothing(shell: Shell, tmp_path: Path) -> None:
    shell.home.mkdir()
    written = tmp_path / "faults.json"
    parts = ("--part", "drafter", "--part", "gateway")
    few = ("--quick", "--max-tokens", "400")
    done = shell.run("bench", "faults", *parts, *few, "--json", str(written))
    assert done.returncode == 0, done.stderr
    document = json.loads(written.read_text())
    killed, front, http = (row for row in document["rows"])
    assert (killed["fault"], killed["streams"]) == ("drafter killed", 20)
    assert killed["back_seconds"] > 0
    assert http["broken"] == 20
    for row in (killed, front, http):
        assert (row["lost"], row["repeated"], row["changed"]) == (0, 0, 0)
        assert row["longest_pause_seconds"] > 0
    shell.assert_nothing_is_left()

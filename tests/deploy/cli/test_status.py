"""How `paceline status` shows the counters."""

from __future__ import annotations

import json
import pickle
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.cli.status import show, summary
from deploy.session import ray_head
from deploy.session.cluster import present_record
from deploy.session.record import ClusterRecord, alone, remove_record, write_record
from paceline import (
    ModelDescription,
    SamplingParams,
    SpeculationStats,
    Stats,
    WorkerLife,
    WorkerStats,
)
from paceline.errors import UnavailableError
from tests.deploy.conftest import Call, Served
from tests.deploy.shell import shown_by

MODEL = ModelDescription("tiny", 384, 512, (2,), SamplingParams(), ("chain",), "chain", 8)
DRAFTING = SpeculationStats(
    drafted_at=(8, 4),
    tried_at=(8, 4),
    accepted_at=(6, 1),
    proposed=20,
    used=9,
    wasted_steps=2,
    diverged=4,
    branch_hits=3,
    target_idle=0.04,
    efficiency=0.75,
    choices={"off": 1, "chain": 9},
    estimates={"step_ms": 18.25, "drafter-0.pass_ms": 2.5},
)


def test_a_server_that_has_made_no_step_has_no_gap(capsys: pytest.CaptureFixture[str]) -> None:
    show("here:1", MODEL, Stats(9.0, 0, 0, 0, 0, 0, 0, 0, 0.0, ()))
    assert "gap none, driver none a step" in capsys.readouterr().out


def test_figures_of_drafting_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    stats = Stats(9.0, 5, 30, 12, 7, 1, 0, 0, 0.4, (), verdicts=10, speculation=DRAFTING)
    assert summary(stats) == {
        "acceptance_length": 3.0,
        "accepted_share": 7 / 12,
        "acceptance": 7 / 12,
        "used_share": 9 / 20,
        "hit_rate": 3 / 4,
    }
    show("here:1", MODEL, stats)
    shown = capsys.readouterr().out
    assert "acceptance length 3.00" in shown
    assert (
        "drafting: acceptance by position 75% 25%; used 45% of 20 proposed tokens, wasted 2 of 10 "
        "verdicts, branches hit 75%; with work at hand target idle 4%, drafters idle none; "
        "efficiency 0.75" in shown
    )
    assert (
        "auto: chain 90%, off 10% of 10 verdicts; estimates: drafter-0.pass_ms 2.5, step_ms 18.2"
        in shown
    )


@pytest.mark.parametrize("command", ["up", "down"])
def test_a_home_that_cannot_be_written_is_one_line(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "file"))
    done = call(command)
    assert done.code == 3
    assert "set PACELINE_HOME to another folder" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_worker_without_a_stream_is_not_called_lost(capsys: pytest.CaptureFixture[str]) -> None:
    """It may only be slow. Known are the time since which, and why, it could not be reached."""
    shard = WorkerStats("shard-0", "target", "here:2", 7, True, 1.5, 9, 40, 0)
    away = replace(
        shard, name="shard-1", connected=False, away_seconds=19.4, trouble="[2] no answer: why"
    )
    show("here:1", MODEL, Stats(99.0, 9, 9, 0, 0, 9, 0, 0, 0.4, (shard, away)))
    shown = capsys.readouterr().out
    assert "connected" in shown
    assert "no answer for 19 s" in shown
    assert "shard-1: [2] no answer: why" in shown
    assert " lost" not in shown


LONG_NAME = "replica-11.shard-7-of-a-deployment-with-long-names"
LIVES = (
    WorkerLife(LONG_NAME, 3, "its process ended: CUDA error", 12.2, f"/logs/run/{LONG_NAME}.log"),
    WorkerLife("driver", 0, log="/logs/run/driver.log"),
)


def test_what_became_of_the_processes_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    show("here:1", MODEL, Stats(9.0, 0, 0, 0, 0, 0, 0, 0, 0.0, (), lives=LIVES))
    shown = capsys.readouterr().out
    assert (
        f"{LONG_NAME}: restarted 3 times, last because: its process ended: CUDA error; next try in "
        f"12 s; log /logs/run/{LONG_NAME}.log" in shown
    )
    assert "driver:" not in shown
    assert "logs: /logs/run, on each worker's host" in shown


WIDE = WorkerStats(
    LONG_NAME, "target", f"a-host-with-a-long-name.{'x' * 40}:45123", 4194303, True, 1.5,
    123456789, 1234567890123, 4,
)  # fmt: skip
CELLS = [
    *(LONG_NAME, "target", WIDE.address, "4194303", "connected"),
    *("2%", "123456789", "1234567890123", "4"),
]


def shown_at(workers: tuple[WorkerStats, ...], columns: str, on_terminal: bool) -> str:
    script = (
        "import pickle, sys\nfrom deploy.cli.status import show\n"
        "show(*pickle.load(sys.stdin.buffer))"
    )
    stats = Stats(99.0, 9, 9, 0, 0, 9, 0, 0, 0.4, workers, lives=LIVES, speculation=DRAFTING)
    return shown_by(script, pickle.dumps(("here:1", MODEL, stats)), columns, on_terminal)


@pytest.mark.parametrize("columns", ["40", "80"])
@pytest.mark.parametrize("on_terminal", [False, True])
def test_nothing_is_cut_however_narrow_it_is(columns: str, on_terminal: bool) -> None:
    """A row is one line in a file. On a terminal that is too narrow, it is a card."""
    shown = shown_at((WIDE,), columns, on_terminal)
    assert "\u2026" not in shown
    lines = shown.splitlines()
    if on_terminal:
        begin = lines.index(LONG_NAME) + 1
        assert [line.split(maxsplit=1)[-1] for line in lines[begin : begin + 8]] == CELLS[1:]
    else:
        [row] = [line for line in lines if line.startswith(f"{LONG_NAME} ")]
        assert row.split() == CELLS


def test_a_usual_deployment_fits_a_terminal_of_80_columns() -> None:
    shard = WorkerStats(
        "shard-0", "target", "127.0.0.1:45123", 419430, True, 1.5, 12345, 1234567, 0
    )
    drafter = replace(shard, name="drafter-0", kind="model")
    lines = shown_at((shard, drafter), "80", True).splitlines()
    table = lines.index(next(line for line in lines if line.startswith("worker")))
    assert max(map(len, lines[: table + 3])) <= 80
    assert not any(title in lines[table] for title in ("reconnects", "malformed", "overruns"))


def test_nothing_counted_yet_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    stats = Stats(0.0, 0, 0, 0, 0, 0, 0, 0, 0.0, ())
    assert set(summary(stats).values()) == {None}
    show("here:1", MODEL, stats)
    assert "acceptance by position none; used none of 0" in capsys.readouterr().out


def test_any_server_can_be_asked(call: Call, served: Served) -> None:
    """For example a job's server, which `up` does not know."""
    done = call("status", "--server", served.address)
    assert done.code == 0, done.stderr
    assert f" at {served.address}, up " in done.stdout
    told = json.loads(call("status", "--server", served.address, "--json").stdout)
    assert told["address"] == served.address
    assert told["ray_address"] is None
    assert {worker["kind"] for worker in told["workers"]} >= {"target", "model"}


def test_a_server_that_is_none_is_named(call: Call) -> None:
    assert call("status", "--server", "nowhere").code == 2
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, but nobody listens
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        done = call("status", "--server", address)
    assert done.code == 3
    assert f"reached at {address}: nothing listens there (connection refused)" in done.stderr
    done = call("status", "--server", "no.such.host.invalid:8001")
    assert done.code == 3
    assert "the host name 'no.such.host.invalid' cannot be looked up" in done.stderr
    done = call("status", "--server", "http://127.0.0.1:8001/")
    assert done.code == 2
    assert "server: expected HOST:PORT" in done.stderr
    assert "give '127.0.0.1:8001' alone" in done.stderr


def test_what_is_at_work_is_told(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """This holds from the beginning of `up`, long before there is a server to ask."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    half_way = ClusterRecord("paceline", None, {}, "127.0.0.1:9", None, "/logs")

    def said() -> str:
        done = call("status")
        assert done.code == 3
        return done.stderr

    assert "nothing is up" in said()
    with alone(tmp_path, "up"):
        assert "a cluster is coming up" in said()
        write_record(tmp_path, half_way)
        assert "a cluster is coming up" in said()
        with pytest.raises(UnavailableError, match="another `paceline up` is at work"):
            alone(tmp_path, "down").__enter__()
    assert "killed half-way: clean up with `paceline down`" in said()
    with alone(tmp_path, "down"):
        assert "is being ended" in said()
    remove_record(tmp_path)
    assert "nothing is up" in said()


def test_a_server_on_all_interfaces_is_reached_by_the_name_of_this_host(tmp_path: Path) -> None:
    head = ray_head.plan_head()
    record = ClusterRecord("one", "0.0.0.0:1", {}, head.address, head, "logs", "[::]:3")
    write_record(tmp_path, record)
    present = present_record(tmp_path)
    assert present is not None
    assert (present.address, present.http_address) == ("localhost:1", "localhost:3")

"""`paceline trace`: the picture of a real run, and of messages made by hand."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.trace import TraceFile, tracing
from paceline.errors import UnavailableError
from paceline.v1 import trace_pb2
from tests.cluster.system import make_checkpoints, running_system
from tests.deploy.conftest import Call, Served

TOKENS = 24


def slices(document: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [
        event
        for event in document["traceEvents"]
        if event["ph"] == "X" and event["name"].startswith(name)
    ]


def traced_step(
    window: trace_pb2.TracedWindow, group: int = 0, *, sent_at: float, answered_at: float
) -> trace_pb2.TraceResponse:
    """A group's first step, with one window."""
    step = trace_pb2.TracedStep(
        step=1,
        group=group,
        sent_at=sent_at,
        answered_at=answered_at,
        forward_seconds=0.018,
        step_seconds=0.019,
        windows=[window],
    )
    return trace_pb2.TraceResponse(step=step)


def check_drawn(document: dict[str, Any]) -> None:
    """Check that no slices of a row overlap in part, and that both ends of each arrow are in a
    slice.
    """
    events = document["traceEvents"]
    rows: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] > 0
            rows.setdefault((event["pid"], event["tid"]), []).append(event)
    for row in rows.values():
        row.sort(key=lambda event: event["ts"])
        for one, other in pairwise(row):
            assert one["ts"] + one["dur"] <= other["ts"] + 0.01
    arrows = [event for event in events if event["ph"] in "sf"]
    assert set(Counter(event["id"] for event in arrows).values()) <= {2}
    for event in arrows:
        holding = [
            one
            for one in rows[event["pid"], event["tid"]]
            if one["ts"] <= event["ts"] <= one["ts"] + one["dur"]
        ]
        assert len(holding) == 1
        assert holding[0]["name"].startswith("pass" if event["ph"] == "s" else "verdict")


async def test_a_run_is_drawn_with_a_row_a_device_and_arrows(tmp_path: Path) -> None:
    checkpoints = make_checkpoints(tmp_path)
    drafters = {"drafter-0": checkpoints.drafter}
    async with running_system(checkpoints, drafters=drafters) as system:
        async with tracing(system.server.address) as drawn:
            answers = [
                await system.client.generate(
                    [5, 6, 7], max_tokens=TOKENS, temperature=0.0, ignore_eos=True, policy=policy
                )
                for policy in ("lockstep", "chain")
            ]
        # No tracer is left.
        await system.client.generate([5, 6, 7], max_tokens=4)
    document = json.loads(json.dumps(drawn.document()))
    check_drawn(document)
    windows = slices(document, "window")
    assert sum(one["args"]["committed"] for one in windows) == 2 * TOKENS
    assert sum(one["args"]["accepted"] for one in windows) == sum(
        answer.stats.accepted for answer in answers
    )
    assert len(slices(document, "step")) == len(slices(document, "verdict")) == drawn.num_steps
    assert len(slices(document, "pass")) == drawn.num_passes > 0
    assert drawn.num_arrows > 0
    named = {
        event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"
    }
    assert {"target target", "drafter-0"} <= named
    assert document["otherData"] == {"model": "target", "emulated": False}


async def test_a_server_that_is_not_there_is_told() -> None:
    with pytest.raises(UnavailableError):
        async with tracing("127.0.0.1:1"):
            pass


def test_passes_that_arrive_late_do_not_overlap() -> None:
    drawn = TraceFile()
    drawn.add(trace_pb2.TraceResponse(begun=trace_pb2.TraceBegun(now=10.0, model="emulated x")))
    for number, received_at in enumerate((10.010, 10.011, 10.020), start=1):
        one = trace_pb2.TracedPass(
            number=number,
            drafter="d",
            received_at=received_at,
            pass_seconds=0.005,
            proposals=[trace_pb2.TracedProposal(sequence_id=1, base_length=4, num_candidates=1)],
        )
        drawn.add(trace_pb2.TraceResponse(drafting=one))
    window = trace_pb2.TracedWindow(
        sequence_id=1, start=3, fed=3, window=2, accepted=1, committed=2, passes=[1, 3, 99]
    )
    drawn.add(traced_step(window, sent_at=10.0201, answered_at=10.040))
    document: dict[str, Any] = drawn.document()
    check_drawn(document)
    assert [one["ts"] for one in slices(document, "pass")] == pytest.approx([5e3, 1e4, 1.5e4])
    assert drawn.num_arrows == 2  # pass 99 was before the trace began
    assert document["otherData"]["emulated"] is True
    (verdict,) = slices(document, "verdict")
    assert verdict["args"] == {"accepted": 1, "committed": 2}


def test_each_target_group_has_a_row() -> None:
    """Steps of two groups overlap; each group numbers its steps from 1."""
    drawn = TraceFile()
    drawn.add(trace_pb2.TraceResponse(begun=trace_pb2.TraceBegun(now=10.0, model="x")))
    for group in (0, 1):
        window = trace_pb2.TracedWindow(sequence_id=1, start=3, fed=3, window=2, committed=1)
        drawn.add(traced_step(window, group, sent_at=10.0, answered_at=10.020 + group / 100))
    document: dict[str, Any] = drawn.document()
    check_drawn(document)
    rows = [one["tid"] for one in slices(document, "step 1")]
    assert len(set(rows)) == 2
    names = [one["args"]["name"] for one in document["traceEvents"] if one["ph"] == "M"]
    assert {"target x", "replica 1 of target x"} <= set(names)


def test_the_command_writes_a_trace_of_a_files_rows(
    call: Call, served: Served, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "the sea is"}\n', encoding="utf-8")
    output = tmp_path / "rounds.json"
    done = call(
        *("trace", "--output", output, "--server", served.address),
        *("--input", rows, "--max-tokens", 8),
    )
    assert done.code == 0, done.stderr
    assert str(output) in done.stdout
    document = json.loads(output.read_text(encoding="utf-8"))
    check_drawn(document)
    assert sum(one["args"]["committed"] for one in slices(document, "window")) == 8


def test_without_a_server_or_an_input_there_is_nothing_to_watch(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    done = call("trace", "--output", tmp_path / "rounds.json")
    assert done.code == 3
    assert "--input" in done.stderr


def test_a_trace_is_a_page_of_its_own_and_says_if_nothing_was_decoded(
    call: Call, served: Served, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "the sea is"}\n', encoding="utf-8")
    page = tmp_path / "trace.html"
    watched = ("trace", "--html", page, "--server", served.address)
    done = call(*watched, "--input", rows, "--max-tokens", 8)
    assert done.code == 0, done.stderr
    assert "open it in a browser" in done.stdout
    assert "nothing was decoded" not in done.stderr
    rounds = rounds_in(page)
    assert "begun" in rounds[0]
    windows = [window for one in rounds for window in one.get("windows", ())]
    assert sum(window["committed"] for window in windows) == 8
    done = call(*watched, "--seconds", 0.1)
    assert done.code == 0, done.stderr
    assert "nothing was decoded in 0.1 s" in done.stderr
    assert len(rounds_in(page)) == 1


def rounds_in(page: Path) -> list[dict[str, Any]]:
    mark = r'(?s)<script type="application/json" id="trace">(.*?)</script>'
    [told] = re.findall(mark, page.read_text(encoding="utf-8"))
    rounds: list[dict[str, Any]] = json.loads(told)
    return rounds

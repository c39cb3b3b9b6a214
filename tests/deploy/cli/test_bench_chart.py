"""`paceline bench plot`: a bar for each row, in colors for light and dark pages."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from deploy.cli.bench_chart import Bar, bars_of
from tests.deploy.conftest import Call

PICTURES = Path(__file__).resolve().parents[3] / "docs" / "pictures"
RUNS = sorted(PICTURES.glob("bench-*.json"))


def _texts(svg: str) -> list[str]:
    return [one.text for one in ElementTree.fromstring(svg).iter() if one.text]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_each_committed_run_is_drawn(path: Path, call: Call, tmp_path: Path) -> None:
    document = json.loads(path.read_text())
    assert document["machine"]["date"]
    done = call("bench", "plot", path, "-o", tmp_path / "chart.svg")
    assert done.code == 0, done.stderr
    drawn = (tmp_path / "chart.svg").read_text()
    said = _texts(drawn)
    speeds = [row["speedup"] for row in document["rows"] if row["speedup"] is not None]
    assert speeds
    told = [text for text in said if re.fullmatch(r"\d+\.\d\d", text)]
    assert sorted(told) == sorted(f"{speed:.2f}" for speed in speeds)
    assert ("EMULATED" in drawn) == document["emulated"]
    assert document["machine"]["date"] in drawn
    # Every color that is drawn has another one for dark pages.
    colors = set(re.findall(r"(?:fill|stroke): (#\w+)", drawn))
    assert colors
    assert all(f'[style*="fill: {color}"]' in drawn for color in colors)
    assert _texts(path.with_suffix(".svg").read_text()) == said


def test_what_differs_makes_panels_or_tells_bars_apart() -> None:
    rows: list[dict[str, Any]] = [
        {"name": "off", "batch": 1, "rtt_ms": None, "speedup": 1.0, "busy": {"target": 0.9}},
        {"name": "chain", "batch": 1, "rtt_ms": 0.1, "speedup": 2.0},
        {"name": "chain", "batch": 1, "rtt_ms": 2.0, "speedup": 1.5},
        {"name": "chain", "batch": 8, "rtt_ms": 2.0, "speedup": None},
        {"kind": "ngram", "batch": 8, "chain": {"speedup": 1.25}, "fanout": {"speedup": 1.5}},
    ]
    assert bars_of(rows, "speedup") == [
        Bar(("batch 1",), "off", 1.0),
        Bar(("batch 1",), "chain, rtt 0.1", 2.0),
        Bar(("batch 1",), "chain, rtt 2", 1.5),
        Bar(("batch 8",), "ngram, chain", 1.25),
        Bar(("batch 8",), "ngram, fanout", 1.5),
    ]
    assert bars_of([{"name": "http", "first_ms": 1.0}], "speedup") == []


def test_what_cannot_be_drawn_is_refused(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    for text, says in {
        "nothing": "expected JSON of a bench",
        "[]": "an object with a list `rows`",
        '{"rows": [{"name": "http"}]}': "rows with speedup or tokens_per_second",
    }.items():
        path.write_text(text)
        done = call("bench", "plot", path)
        assert (done.code, done.stdout) == (2, "")
        assert says in done.stderr
    assert "ends in .svg" in call("bench", "plot", path, "-o", tmp_path / "chart.png").stderr
    assert "after `plot`" in call("bench", "plot").stderr
    assert "only plot takes a file" in call("bench", "decode", path).stderr
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "paceline-server[plan]" in call("bench", "plot", path).stderr

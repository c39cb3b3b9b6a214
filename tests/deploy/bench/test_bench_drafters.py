"""`paceline bench drafters`: what it starts and asks for, its report, and a run on tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.config.model import Config
from deploy.bench.drafters import (
    FREE,
    KINDS,
    MERGED,
    PREDICTED,
    PREDICTED_WRONG,
    Asks,
    deployments,
    kinds_of,
    show_drafters,
)
from deploy.rows.inputs import BENCH_INPUTS, InputRow, read_rows
from paceline.client import Client
from tests.deploy.bench.benches import run_bench, shown_by
from tests.deploy.conftest import Served


def test_kinds_share_two_deployments() -> None:
    configs = deployments(Config(), KINDS)
    assert {name: [one.kind for one in each.drafters] for name, each in configs.items()} == {
        "free": list(FREE),
        "models": ["model", "suffix"],
    }
    with Client("127.0.0.1:1") as client:  # nothing is sent
        clients = dict.fromkeys(configs, client)
        names = [kind.name for kind in kinds_of(clients, configs, KINDS)]
        some = [kind.name for kind in kinds_of(clients, configs, ("suffix", MERGED))]
        predicting = kinds_of(clients, configs, KINDS)[-2:]
    assert names == [*FREE, "model", MERGED, PREDICTED, PREDICTED_WRONG]
    assert some == ["suffix", MERGED]
    assert list(deployments(Config(), ("ngram",))) == ["free"]
    rows = [Asks((1,), "one"), Asks((2,), "two")]
    asked = [kind.predictions(rows)[2,] for kind in predicting]
    assert asked == ["two", "one"]


def test_the_files_of_the_bench_have_rows_and_predictions() -> None:
    for path in BENCH_INPUTS:
        rows = read_rows(path)
        assert all(isinstance(row, InputRow) for row in rows), path
        predictions = [row.prediction for row in rows if isinstance(row, InputRow)]
        assert all(predictions) == (path.stem == "edits"), path


def test_a_report_has_a_row_for_each_kind() -> None:
    speed = {"tokens_per_second": 40.0, "speedup": 1.9, "tokens_a_step": 2.5, "same_text": True}
    accepted = {"0": [0.5, 0.25, 1.0], "1": [0.4]}
    drafted = {"kind": "suffix", "pass_ms": 0.1, "acceptance_at": accepted, "chain": speed}
    rows = [{"file": "edits", "kind": "off"}, {"file": "edits", **drafted}]
    said = shown_by(show_drafters, {"rows": rows})
    line = next(line for line in said.splitlines() if "suffix" in line)
    assert line.split() == ["suffix", "0.10", "0.50", "0.40", "1.90", "2.50", "yes"]


@pytest.mark.ray
@pytest.mark.release
def test_drafters_measures_every_kind(served: Served, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    row = json.dumps({"prompt": "one two one two one", "prediction": " two one two"})
    source.write_text(f"{row}\n{row}")
    flags = ["--max-tokens", "8", "--limit", "2", "--repeats", "1"]
    rows, said = run_bench("drafters", served.config, tmp_path, "--input", source, *flags)
    kinds = {row["kind"]: row for row in rows}
    assert set(kinds) == {
        *("off", *FREE, "model", MERGED, PREDICTED, PREDICTED_WRONG, "hf", "hf-assisted")
    }
    assert all(kinds[one]["chain"]["same_text"] for one in (*FREE, "model", MERGED, PREDICTED))
    assert kinds["model"]["fanout"]["same_text"]
    assert set(kinds["suffix"]["acceptance_at"]) == {"0", "0.7", "1"}
    assert kinds["model"]["pass_ms"] > 0
    assert "hf-assisted" in said

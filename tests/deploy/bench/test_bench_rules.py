"""`paceline bench rules`: its rows, goals and report, and the whole suite on tiny models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from cluster.config.model import Config
from deploy.bench.harness import Ours, Row, TokensAndSteps, jackknife_error, length_of
from deploy.bench.rules import (
    drafted,
    goals,
    rules_document,
    show_rules,
    time_rules,
)
from paceline.client import Client
from paceline.options import GenerateOptions
from tests.deploy.bench.benches import run_bench, shown_by
from tests.deploy.cli.test_generate import ROWS, write_rows
from tests.deploy.conftest import Served
from workers.verification.rule import RULES


def time_row(rule: str, ms: float, window: int) -> Row:
    return {
        **{"part": "time", "name": f"{rule} {window}", "rule": rule, "candidates": "chain"},
        **{"ms": ms, "vocab_size": 49_152, "window": window, "batch": 1},
    }


def length_row(rule: str, by_prompt: Sequence[TokensAndSteps]) -> Row:
    return {
        **{"part": "acceptance", "name": f"{rule} 0.7", "rule": rule, "candidates": "2 wide"},
        **{"temperature": 0.7, "acceptance_length": length_of(by_prompt), "by_prompt": by_prompt},
        "standard_error": jackknife_error(by_prompt, length_of),
    }


ROWS_OF_A_RUN = [
    time_row("coupled", 1.5, 8),
    time_row("coupled", 9.0, 64),
    time_row("kseq", 6.0, 8),
    length_row("coupled", [(40, 10), (20, 10)]),
    length_row("kseq", [(20, 10), (20, 10)]),
    length_row("mcsd", [(30, 10), (20, 10)]),
]


def test_goals_are_ratios_of_the_rows_that_are_there() -> None:
    found = {goal.name: goal.ratio for goal in goals(ROWS_OF_A_RUN)}
    assert found == {
        "3 ms / coupled chain of 8": pytest.approx(2.0),
        "length, 2 wide, T=0.7: coupled / kseq": pytest.approx(1.5),
        "length, 2 wide, T=0.7: coupled / mcsd": pytest.approx(1.2),
    }
    assert goals(ROWS_OF_A_RUN[:0]) == []


def test_an_error_is_of_the_prompts() -> None:
    (goal,) = [goal for goal in goals(ROWS_OF_A_RUN) if "kseq" in goal.name]
    # Without the first prompt the ratio is 1, without the second 2: their spread, halved.
    assert goal.error == pytest.approx(0.5)
    assert jackknife_error([(4, 2), (8, 4)], length_of) == 0.0
    assert jackknife_error([(4, 2)], length_of) is None


def test_the_report_is_narrow_and_has_every_row() -> None:
    report = rules_document(ROWS_OF_A_RUN)
    lines = shown_by(show_rules, report).splitlines()
    assert "length, 2 wide, T=0.7: coupled / kseq = 1.50 +- 0.50 (aim 1)" in lines
    assert report["emulated"] is False
    assert [row["name"] for row in report["rows"]] == [row["name"] for row in ROWS_OF_A_RUN]
    assert report["rows"][0]["ms"] == 1.5


def test_a_busy_host_changes_no_acceptance() -> None:
    config = drafted(Config())
    assert [one.kind for one in config.drafters] == ["model"]
    assert config.target.threads == 1
    assert config.speculation.wait_ms == 60_000


def test_no_tenant_sees_a_prompt_twice(served: Served) -> None:
    """A drafter that learns would already know the answer."""
    with Client(served.address) as client:
        options = GenerateOptions(temperature=0.0, policy="off")
        contender = Ours("off", client, options)
        first = contender.decode([5, 6, 7], 3)
        again = contender.decode([5, 6, 7], 3)
    assert first.token_ids == again.token_ids
    assert contender.times_sent == {(5, 6, 7): 2}


def test_every_rule_is_timed_on_chains_and_trees() -> None:
    """Each case gives a row as soon as it is done. Draws of the drafter's distribution are
    accepted.
    """
    told: list[str] = []
    rows = time_rules(told.append, repeats=1, vocab_sizes=(200,), windows=(1, 8), batches=(1, 2))
    assert [f"time: {row['name']}" for row in rows] == told
    num_rules = len(list(RULES))
    # Chains of two windows and trees of one, two batches each; rejection has no trees.
    assert len(rows) == 2 * (2 * num_rules + num_rules - 1)
    for row in rows:
        assert 0 < row["best_ms"] <= row["ms"] <= row["worst_ms"]
        if (row["rule"], row["candidates"]) == ("coupled", "chain"):
            assert row["accepted"] == row["window"]


@pytest.mark.ray
@pytest.mark.release
def test_rules_measures_every_rule(served: Served, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", ROWS[:1])
    flags = ("--max-tokens", "8", "--quick", "--part", "acceptance")
    rows, _ = run_bench("rules", served.config, tmp_path, "--input", source, *flags)
    assert {row["part"] for row in rows} == {"acceptance"}
    assert {row["rule"] for row in rows} == {"coupled", "rejection", "kseq", "recursive", "mcsd"}

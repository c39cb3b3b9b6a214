"""The timing of rules, on a vocabulary so small that it takes no time."""

from __future__ import annotations

from deploy.bench.rules_time import RuleTime, time_rules
from workers.verification.rules import Rule


def test_every_rule_is_timed_on_chains_and_trees() -> None:
    """A row each, told as it is done; draws of the drafter's own distribution are accepted."""
    told: list[RuleTime] = []
    rows = time_rules(
        vocab_sizes=(200,), windows=(1, 8), batches=(1, 2), repeats=1, on_row=told.append
    )
    assert rows == told
    # Chains of two windows and trees of one, two batches each; rejection has no trees.
    assert len(rows) == 2 * (2 * len(Rule) + len(Rule) - 1)
    assert all(0 < row.best_ms <= row.ms <= row.worst_ms for row in rows)
    for row in rows:
        if row.rule == "coupled" and row.candidates == "chain":
            assert row.accepted == row.window

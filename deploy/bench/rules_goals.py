"""What issue B aims at, as ratios of rows of one run; none of them fails a run."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from deploy.bench.rules_rows import RuleRow
from deploy.bench.rules_stopping import POLICIES
from deploy.bench.rules_time import VOCAB_SIZES
from deploy.bench.spread import TokensAndSteps, jackknife_error, length_ratio

AIM_MS = 3.0
"""Of the coupled rule on a chain of 8, one sequence, the smaller vocabulary."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A ratio that should be at least `aim`. `error`: its standard error over prompts, if known."""

    name: str
    ratio: float
    aim: float
    error: float | None = None


def goals(rows: Sequence[RuleRow]) -> list[Goal]:
    """All goals that the rows say something about."""
    return [*_time(rows), *_acceptance(rows), *_stopping(rows), *_train_free(rows)]


def _time(rows: Sequence[RuleRow]) -> Iterator[Goal]:
    wanted = {"vocab_size": VOCAB_SIZES[0], "window": 8, "batch": 1}
    for row in rows:
        if (row.part, row.rule, row.candidates) != ("time", "coupled", "chain"):
            continue
        if row.ms is not None and wanted.items() <= dict(row.details).items():
            yield Goal(f"{AIM_MS:g} ms / coupled chain of 8", AIM_MS / row.ms, 1.0)


def _acceptance(rows: Sequence[RuleRow]) -> Iterator[Goal]:
    counts = {
        (row.rule, row.candidates, row.temperature): cast(
            "Sequence[TokensAndSteps]", row.details["by_prompt"]
        )
        for row in rows
        if row.part == "acceptance"
    }
    for (rule, candidates, temperature), theirs in counts.items():
        coupled = counts.get(("coupled", candidates, temperature))
        if rule in ("kseq", "recursive") and coupled is not None:
            pairs = list(zip(coupled, theirs, strict=True))
            yield Goal(
                f"length, {candidates}, T={temperature:g}: coupled / {rule}",
                length_ratio(pairs),
                1.0,
                jackknife_error(pairs, length_ratio),
            )


def _stopping(rows: Sequence[RuleRow]) -> Iterator[Goal]:
    for policy in POLICIES:
        mine = [
            row for row in rows if row.part == "stopping" and row.details.get("policy") == policy
        ]
        speed = {row.name: row.speedup for row in mine if row.speedup is not None}
        fixed = [value for name, value in speed.items() if name.startswith(f"{policy} fixed")]
        cost, adaedl = speed.get(f"{policy} cost"), speed.get(f"{policy} adaedl")
        if cost is None or adaedl is None or not fixed:
            continue
        yield Goal(f"{policy}: cost / adaedl", cost / adaedl, 1.0)
        yield Goal(f"{policy}: adaedl / median fixed", adaedl / statistics.median(fixed), 1.0)
        yield Goal(f"{policy}: cost / best fixed", cost / max(fixed), 1.0)


def _train_free(rows: Sequence[RuleRow]) -> Iterator[Goal]:
    speed = {
        row.name: row.speedup
        for row in rows
        if row.details.get("drafter") == "recycling" and row.speedup is not None
    }
    if speed:
        best = max(speed, key=lambda name: speed[name])
        yield Goal(f"{best} / off", speed[best], 1.5)

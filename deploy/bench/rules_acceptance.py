"""Part "acceptance" of `bench rules`: tokens a step of each rule, at equal budgets of nodes.

One request a time under policy lockstep, where a step waits for the whole window, so that what is
accepted does not depend on the speed of the machine. Prompt i is decoded with seed i by every
row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from deploy.bench.interleave import Prompts
from deploy.bench.rules_rows import RuleRow, candidates_shown
from deploy.bench.spread import TokensAndSteps, jackknife_error, length_of
from paceline.client import Client
from paceline.options import GenerateOptions

WINDOW = 8
"""Nodes a step, whatever their shape."""
TEMPERATURES = (0.0, 0.7, 1.0)
SHAPES: Sequence[tuple[str, int]] = (
    ("coupled", 1),
    ("rejection", 1),
    ("coupled", 2),
    ("kseq", 2),
    ("recursive", 2),
    ("mcsd", 2),
    ("coupled", 4),
    ("kseq", 4),
    ("recursive", 4),
    ("mcsd", 4),
)
"""Rules and children of a node, or paths. On a chain kseq, recursive and mcsd are rejection."""


@dataclass(slots=True)
class _Counts:
    by_prompt: list[TokensAndSteps] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0


def measure_acceptance(
    client: Client, prompts: Prompts, *, max_tokens: int, tell: Callable[[str], None]
) -> list[RuleRow]:
    """A row for each shape and temperature."""
    rows: list[RuleRow] = []
    for temperature in TEMPERATURES:
        for rule, branches in SHAPES:
            tell(f"acceptance: {rule}, {candidates_shown(branches)}, temperature {temperature:g}")
            counts = _Counts()
            for number, prompt in enumerate(prompts):
                options = GenerateOptions(
                    temperature=temperature,
                    top_k=0,
                    top_p=1.0,
                    seed=number,
                    max_tokens=max_tokens,
                    policy="lockstep",
                    rule=rule,
                    window=WINDOW,
                    branches=branches,
                    stopping="fixed",
                    drafter="model",
                )
                completion = client.generate(list(prompt), options)
                counts.by_prompt.append((len(completion.token_ids), completion.stats.steps))
                counts.drafted += completion.stats.drafted
                counts.accepted += completion.stats.accepted
            rows.append(_row(rule, branches, temperature, counts))
    return rows


def _row(rule: str, branches: int, temperature: float, counts: _Counts) -> RuleRow:
    candidates = candidates_shown(branches)
    return RuleRow(
        part="acceptance",
        name=f"{rule}, {candidates}, T={temperature:g}",
        rule=rule,
        candidates=candidates,
        temperature=temperature,
        acceptance_length=length_of(counts.by_prompt),
        details={
            "policy": "lockstep",
            "drafter": "model",
            "window": WINDOW,
            "tokens": sum(tokens for tokens, _ in counts.by_prompt),
            "steps": sum(steps for _, steps in counts.by_prompt),
            "by_prompt": counts.by_prompt,
            "standard_error": jackknife_error(counts.by_prompt, length_of),
            "drafted": counts.drafted,
            "accepted": counts.accepted,
        },
    )

"""Part "train-free" of `bench rules`: n-grams and Token Recycling against plain decoding.

The drafters need next to nothing, so the target has all cores in every row.
"""

from __future__ import annotations

from collections.abc import Callable

from deploy.bench.interleave import Prompts, measure_in_turns
from deploy.bench.rules_rows import OFF, RequestContender, RuleRow, candidates_shown, row_of
from paceline.client import Client
from paceline.options import GenerateOptions

DRAFTERS = ("ngram", "recycling")
SHAPES = ((4, 1), (8, 1), (8, 2), (16, 4))
"""Windows and branches of both."""
BY_COST = (16, 8)
"""Window and branches within which Token Recycling stops by cost; n-grams have no estimates."""


def train_free_contenders(client: Client) -> list[RequestContender]:
    """Plain decoding, then chains and trees of each drafter; all greedy."""
    contenders = [
        RequestContender(OFF, client, GenerateOptions(temperature=0.0, seed=0, policy=OFF))
    ]
    shapes = [(drafter, *shape, "fixed") for drafter in DRAFTERS for shape in SHAPES]
    for drafter, window, branches, stopping in [*shapes, ("recycling", *BY_COST, "cost")]:
        options = GenerateOptions(
            temperature=0.0,
            seed=0,
            rule="coupled",
            policy="lockstep",
            window=window,
            branches=branches,
            stopping=stopping,
            drafter=drafter,
        )
        name = f"{drafter} {candidates_shown(branches)} {window}"
        name += "" if stopping == "fixed" else f" {stopping}"
        contenders.append(RequestContender(name, client, options))
    return contenders


def measure_train_free(
    client: Client,
    prompts: Prompts,
    *,
    max_tokens: int,
    repeats: int,
    tell: Callable[[str], None],
) -> list[RuleRow]:
    """All of them in turns."""
    measured = measure_in_turns(
        train_free_contenders(client),
        prompts,
        max_tokens=max_tokens,
        repeats=repeats,
        on_sample=lambda name: tell(f"train-free: {name}"),
    )
    return [row_of("train-free", one, measured[0]) for one in measured]

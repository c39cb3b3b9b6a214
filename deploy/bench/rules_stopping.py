"""Part "stopping" of `bench rules`: each stopping rule against fixed windows, in tokens/s."""

from __future__ import annotations

from collections.abc import Callable

from deploy.bench.interleave import Prompts, measure_in_turns
from deploy.bench.rules_rows import OFF, RequestContender, RuleRow, row_of
from paceline.client import Client
from paceline.options import GenerateOptions

POLICIES = ("lockstep", "chain")
FIXED_WINDOWS = (2, 3, 4, 6, 8, 12)
STOPPING_RULES = ("adaedl", "confidence", "cost")
LONGEST = FIXED_WINDOWS[-1]
"""The window within which the stopping rules are free."""


def stopping_contenders(drafted: Client, plain: Client) -> list[RequestContender]:
    """Plain decoding, then the sweep and the rules for each policy; all greedy chains."""
    greedy = {"temperature": 0.0, "seed": 0, "rule": "coupled"}
    shapes = [("fixed", window) for window in FIXED_WINDOWS]
    shapes += [(rule, LONGEST) for rule in STOPPING_RULES]
    return [
        RequestContender(OFF, plain, GenerateOptions(**greedy, policy=OFF)),  # type: ignore[arg-type]
        *(
            RequestContender(
                f"{policy} {stopping}" + (f" {window}" if stopping == "fixed" else ""),
                drafted,
                GenerateOptions(
                    **greedy,  # type: ignore[arg-type]
                    policy=policy,
                    window=window,
                    stopping=stopping,
                    branches=1,
                    drafter="model",
                ),
            )
            for policy in POLICIES
            for stopping, window in shapes
        ),
    ]


def measure_stopping(
    drafted: Client,
    plain: Client,
    prompts: Prompts,
    *,
    max_tokens: int,
    repeats: int,
    tell: Callable[[str], None],
) -> list[RuleRow]:
    """All of them in turns. `drafted`: target and model drafter with a core each; `plain`: both
    cores for the target.
    """
    measured = measure_in_turns(
        stopping_contenders(drafted, plain),
        prompts,
        max_tokens=max_tokens,
        repeats=repeats,
        on_sample=lambda name: tell(f"stopping: {name}"),
    )
    return [row_of("stopping", one, measured[0]) for one in measured]

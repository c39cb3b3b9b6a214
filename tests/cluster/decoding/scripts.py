"""Short scripts for the scheduler: one sequence with one drafter, named "d"."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from cluster.decoding.counts import CountedVerdict, Foresight
from cluster.decoding.events import (
    Admitted,
    DrafterJoined,
    Proposal,
    Proposed,
    Request,
    SequenceVerdict,
    StepDone,
    TargetJoined,
)
from cluster.decoding.instructions import (
    Instruction,
    RunStep,
)
from cluster.decoding.policies import PolicyName
from cluster.decoding.scheduler import Scheduler
from paceline.prefix_hash import hash_prefix
from tests.cluster.decoding.true_text import request
from workers.verification.rule import RULES

PROMPT = (7, 8, 9)


def started(policy: PolicyName = PolicyName.CHAIN, **options: Any) -> Scheduler:
    """A scheduler with a target, one drafter and sequence 1 decoding after its prompt's step."""
    scheduler = Scheduler(wait_seconds=2.0)
    scheduler.handle(TargetJoined(0, 50, 1000, 4, 64))
    scheduler.handle(DrafterJoined(0, "d", 1000))
    scheduler.handle(Admitted(0, request(1, PROMPT, policy=policy, **options)))
    return scheduler


def verdict(step: int, accepted: int, token: int, now: float = 1.0) -> StepDone:
    return StepDone(now, step, (SequenceVerdict(1, accepted, token),))


def proposal(path: Sequence[int], *token_ids: int, last: bool = False) -> Proposed:
    made = Proposal(1, len(path), hash_prefix(path), token_ids, last)
    return Proposed(0.5, "d", (made,))


def verdict_of(window: int, accepted: int) -> CountedVerdict:
    """A verdict on a chain of `window`, as it is counted."""
    foresight = Foresight.NOTHING if accepted == window else Foresight.OTHERS
    tried = min(window, accepted + 1)
    return CountedVerdict(window, window, tried, accepted, accepted + 1, foresight)


def the_step(instructions: list[Instruction]) -> RunStep:
    assert isinstance(instructions[0], RunStep), "the step goes out before all else"
    return instructions[0]


def tree_request(rule: str, *, window: int = 6, branches: int = 2) -> Request:
    asked = request(1, PROMPT, window=window, branches=branches)
    return dataclasses.replace(asked, spec=dataclasses.replace(asked.spec, rule=rule))


def started_with(asked: Request) -> Scheduler:
    scheduler = Scheduler(wait_seconds=2.0)
    scheduler.handle(TargetJoined(0, 50, 1000, 4, 64))
    scheduler.handle(DrafterJoined(0, "d", 1000, rules=frozenset(RULES)))
    scheduler.handle(Admitted(0, asked))
    return scheduler


def tree_proposal(
    path: Sequence[int], token_ids: tuple[int, ...], parents: tuple[int, ...]
) -> Proposed:
    made = Proposal(1, len(path), hash_prefix(path), token_ids, parents=parents)
    return Proposed(0.5, "d", (made,))

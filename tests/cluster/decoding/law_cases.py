"""Ways to serve a request whose law is enumerated (law_world.py), and checks of that law."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from tests.cluster.decoding.law_drafter import (
    BegunModels,
    BranchingProposer,
    EnumeratedProposer,
)
from tests.cluster.decoding.law_faults import Fault
from tests.cluster.decoding.law_world import MakeProposer, Served, Timing, request, served
from tests.workers.verification.enumeration import is_exact
from workers.drafting.kind import Proposer
from workers.drafting.kinds.ngram import NgramProposer
from workers.drafting.kinds.recycling import RecyclingProposer

LOCKSTEP, PEARL, CHAIN = "lockstep", "pearl", "chain"
FANOUT = "fanout"

MODEL, OTHER_MODEL = "model", "other-model"
"""Drafters with different distributions."""

PROPOSERS: dict[str, Callable[[BegunModels], Proposer]] = {
    MODEL: EnumeratedProposer,
    OTHER_MODEL: lambda models: EnumeratedProposer(BegunModels(models.vocab_size, "other")),
    "ngram": lambda models: NgramProposer(),
    "recycling": lambda models: RecyclingProposer(),
    "branching": BranchingProposer,
}


@dataclass(frozen=True)
class Case:
    """How a rule is served.

    `length`: the number of tokens that are compared; the first one is certain. `fault`: what goes
    wrong, if anything. `drafters`: their kinds; unless they are merged, the first one works for the
    sequence.
    """

    rule: str
    policy: str
    branches: int
    window: int
    timing: Timing
    vocab_size: int
    fault: Fault | None = None
    length: int = 3
    drafters: tuple[str, ...] = (MODEL,)
    merge: bool = False

    def __str__(self) -> str:
        shape = f"{self.branches}x{self.window}of{self.vocab_size}"
        when = f"{self.timing.during}late{self.timing.late}"
        parts = [self.rule, self.policy, shape, when]
        if self.drafters != (MODEL,):
            parts += self.drafters
        if self.fault is not None:
            parts.append(str(self.fault))
        return "-".join(parts)

    @property
    def models(self) -> BegunModels:
        return BegunModels(self.vocab_size, "random")

    def serve(self) -> Served:
        asked = request(
            self.rule,
            policy=self.policy,
            branches=self.branches,
            window=self.window,
            max_tokens=self.length + 1,
            merge=self.merge,
        )
        models = self.models

        def make_of(kind: str) -> MakeProposer:
            return lambda: PROPOSERS[kind](models)

        makes = {f"{number}-{kind}": make_of(kind) for number, kind in enumerate(self.drafters)}
        return served(models, asked, self.timing, self.length, makes=makes, fault=self.fault)

    def check_exact(self) -> Served:
        """Check that the law is the target's own, and that candidates were verified."""
        found = self.serve()
        assert is_exact(self.models, found.law)
        assert max(part.window for part in found.windows) > 0
        return found

    def check_noticed(self) -> None:
        """Check that the law differs from the target's by more than rounding."""
        law = self.serve().law
        assert not is_exact(self.models, law)
        assert law.sum() == pytest.approx(1)
        assert np.abs(law - self.models.law((), self.length)).max() > 1e-4

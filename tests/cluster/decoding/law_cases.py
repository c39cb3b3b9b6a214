"""Ways to serve a request whose law is enumerated (law_world.py), and what is asked of the law."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from cluster.decoding.policies import PolicyName
from paceline.rules import Rule
from tests.cluster.decoding.law_drafter import BegunModels
from tests.cluster.decoding.law_world import Fault, Served, Timing, request, served
from tests.workers.verification.enumeration import is_exact

LOCKSTEP, PEARL, CHAIN = PolicyName.LOCKSTEP, PolicyName.PEARL, PolicyName.CHAIN


@dataclass(frozen=True)
class Case:
    """How a rule is served. `length` counts the tokens looked at, the first of which is certain.

    `fault`: when the target is lost, if it is.
    """

    rule: Rule
    policy: PolicyName
    branches: int
    window: int
    timing: Timing
    vocab_size: int
    fault: Fault | None = None
    length: int = 3

    def __str__(self) -> str:
        shape = f"{self.branches}x{self.window}of{self.vocab_size}"
        when = f"{self.timing.during}late{self.timing.late}"
        name = f"{self.rule.value}-{self.policy.value}-{shape}-{when}"
        if self.fault is None:
            return name
        if self.fault.paused:
            return f"{name}-paused{self.fault.step}"
        too = "-drafter-too" if self.fault.drafter_too else ""
        return f"{name}-lost{self.fault.step}away{self.fault.away}{too}"

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
        )
        return served(self.models, asked, self.timing, self.length, fault=self.fault)

    def check_exact(self) -> None:
        """The law is the target's own, and candidates were verified on the way."""
        found = self.serve()
        assert is_exact(self.models, found.law)
        assert max(part.window for part in found.windows) > 0

    def check_noticed(self) -> None:
        """The law is another one, and by more than rounding."""
        law = self.serve().law
        assert not is_exact(self.models, law)
        assert law.sum() == pytest.approx(1)
        assert np.abs(law - self.models.law((), self.length)).max() > 1e-4

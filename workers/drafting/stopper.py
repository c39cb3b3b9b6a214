"""A sequence's stopping rule, and the signals of its drafted nodes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from paceline.rules import Stopping
from workers.drafting.acceptance_map import TokenSignal, signal_of
from workers.drafting.stopping import CostAware, DrafterStopping, Prices
from workers.drafting.tree import Grant, Kept

if TYPE_CHECKING:
    import torch


class Stopper:
    """Decides under which nodes nothing more is drafted. Under the rule `fixed` it never stops.

    It looks only at tokens that are in the tree and hence sent: no token is dropped because of what
    it decides.
    """

    def __init__(self, stopping: Stopping, shared: DrafterStopping) -> None:
        self.rule = shared.rule(stopping)
        self._signals: dict[int, TokenSignal] = {}
        self._kept = 0
        self._is_told = False

    @property
    def watches(self) -> bool:
        """Whether the rule needs signals."""
        return self.rule is not None

    def signals(self, logits_V: torch.Tensor, token_ids: Sequence[int]) -> list[TokenSignal]:
        """The signals of tokens drafted from the same logits."""
        logits = logits_V.numpy()
        first = signal_of(logits, token_ids[0])
        return [first] + [
            TokenSignal(
                first.entropy,
                first.margin,
                first.draft_prob * math.exp(min(float(logits[one] - logits[token_ids[0]]), 80.0)),
            )
            for one in token_ids[1:]
        ]

    def note(self, node: int, signal: TokenSignal) -> None:
        """Keep the signal of a node that was drafted."""
        self._signals[node] = signal

    def stops_after(self, path: Sequence[int], grant: Grant, *, pass_ms: float) -> bool:
        """Whether to draft nothing after the nodes of `path`, a path from the root.

        After the root itself something is always drafted. Rules that are blind to cost judge only
        what was drafted since the last outcome: as published, a draft begins anew after a verdict,
        so run-ahead that was kept does not count. They are made for drafts that the target waits
        for, and end no draft while drafting is free, since the drafter would only be idle.
        """
        by_cost = isinstance(self.rule, CostAware)
        if not by_cost:
            path = [node for node in path if node > self._kept]
        if self.rule is None or not path:
            return False
        prices = Prices(
            grant.tokens_per_ms,
            0.0 if grant.drafting_is_free else pass_ms,
            grant.step_ms_per_candidate,
        )
        stops = self.rule.should_stop([self._signals[node] for node in path], prices)
        return stops and (by_cost or not grant.drafting_is_free)

    def committed(self, kept: Kept, refused: Sequence[int], *, longest: int) -> None:
        """Learn from an outcome.

        `refused` are the verified nodes after the path that agreed; the first of them was tested
        and refused. `longest`: the longest draft that was allowed, in tokens.
        """
        self._is_told = False
        if self.rule is None:
            return
        drafted = [self._signals[node] for node in (*kept.path, *refused)]
        if drafted:
            self.rule.learn(drafted, len(kept.path), longest=longest)
        self._kept = len(kept.nodes)
        self._signals = {
            number: self._signals[old] for number, old in enumerate(kept.nodes, start=1)
        }

    def state(self) -> Mapping[str, float]:
        """The rule's state by name; empty for `fixed`."""
        return self.rule.metrics() if self.rule is not None else {}

    def news(self) -> Mapping[str, float]:
        """The state once after each outcome, else empty.

        It serves only a request's metrics, so it must not lengthen each of its proposals.
        """
        if self._is_told:
            return {}
        self._is_told = True
        return self.state()

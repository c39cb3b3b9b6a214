"""The interface of lookahead policies: what a policy sees and decides; the registry of policies.

A policy is a file that defines a subclass of `LookaheadPolicy` and adds an instance to `POLICIES`.
Ours are in cluster/decoding/policies. A package that adds another policy imports only this module
of Paceline (docs/extending.md).

A policy is a pure function of what the scheduler knows of one sequence. It returns grants and
windows. Drafters know nothing of policies.
"""

from __future__ import annotations

import logging
import math
import operator
import pkgutil
from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from paceline.errors import ConfigError
from paceline.limits import MAX_WINDOW
from workers.process.plugin_registry import Registry
from workers.verification.rule import RULES, rule_named

if TYPE_CHECKING:
    from cluster.decoding.sequence import Sequence

_log = logging.getLogger(__name__)

_failed: set[str] = set()
"""Policies whose failure was logged."""

_MOST_GRANTED = 1 << 16
"""Upper bound on a grant's candidates; no policy of ours comes near."""

MOST_CHAINS = 64
"""Upper bound on the chains and branches that a drafter grows in a pass, over all its sequences.
Each costs the drafter a node and the driver a proposal. With many sequences at a time this costs
more than branches gain (docs/policies.md).
"""


class DraftView:
    """What a policy sees of a sequence. Counts are tokens, times are of the driver's clock."""

    __slots__ = ("_ahead", "_sequence")

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        # Candidates that some group is verifying, where several may; None: no group is.
        self._ahead = sequence.num_verifying if sequence.policy.replicates else None

    @property
    def num_candidates(self) -> int:
        """Candidates that a step could verify, at most `window` of them."""
        limit = self._sequence.window
        if self._ahead is not None:
            limit += self._ahead + 1
        return self._sequence.tree.num_verifiable(limit)

    @property
    def in_flight(self) -> int:
        """Candidates that are being verified."""
        if self._sequence.policy.replicates:
            return self._ahead or 0
        return self._sequence.tree.num_pinned

    @property
    def kept(self) -> int:
        """Candidates that the last verdict left."""
        return self._sequence.kept

    @property
    def window(self) -> int:
        """The most candidates that a step verifies."""
        return self._sequence.window

    @property
    def is_tree(self) -> bool:
        """Whether a window may have several candidates at one position."""
        sequence = self._sequence
        if sequence.pilot is not None and sequence.pilot.choice.is_tree:
            return True
        return sequence.request.branches > 1 or sequence.request.merge

    @property
    def useful_candidates(self) -> int:
        """The most candidates on one path that can be of use."""
        return self._sequence.useful_candidates

    @property
    def num_drafters(self) -> int:
        """Drafters that share the sequence."""
        return self._sequence.num_sharing

    @property
    def ready_since(self) -> float:
        """When the next step could have begun."""
        return self._sequence.ready_since

    @property
    def is_coupled(self) -> bool:
        """Whether drafts are compared with the target's own tokens; else coins are tossed."""
        return rule_named(self._sequence.request.spec.rule).shares_noise

    @property
    def acceptance(self) -> float | None:
        """The chance of a candidate given those before it, over all verdicts; None: not known."""
        return self._sequence.counts.acceptance

    @property
    def pace(self) -> float:
        """Passes of the drafter in the time of a step; 0: not known yet."""
        return self._sequence.pace

    @property
    def crowd(self) -> int:
        """Sequences that the drafter drafts for, this one included."""
        return self._sequence.crowd

    @property
    def num_groups(self) -> int:
        """Groups of the target that serve the sequence."""
        return 1 + len(self._sequence.replicas)

    @property
    def verifying(self) -> bool:
        """Whether one of several groups is verifying a window of the sequence."""
        return self._ahead is not None

    @property
    def waits_in_vain(self) -> bool:
        """Whether no more candidates will come before the next verdict."""
        return self._sequence.draft_exhausted or self._sequence.drafter is None


@dataclass(frozen=True, slots=True)
class Wait:
    """Do not step yet.

    `until`: when to step at the latest, by the driver's clock. math.inf: when the next event comes,
    which is on its way in any case.
    """

    until: float = math.inf


@dataclass(frozen=True, slots=True)
class Needs:
    """What a policy asks of a request and of the layout.

    `chains_only`: a step verifies no trees. `no_draft_probs`: a rule that needs no draft
    probabilities, whose verdicts a drafter can foresee. `shared_noise`: a rule under which the
    target's own token decides. `drafters`, `groups`: the fewest drafters and target groups.
    """

    chains_only: bool = False
    no_draft_probs: bool = False
    shared_noise: bool = False
    drafters: int = 0
    groups: int = 1

    def serve(self, rule: str) -> bool:
        """Whether the policy works with the rule of this name."""
        facts = rule_named(rule)
        if self.shared_noise and not facts.shares_noise:
            return False
        return not (self.no_draft_probs and facts.needs_draft_probs)

    @property
    def allow_merging(self) -> bool:
        """Whether drafters of several kinds may draft for one request."""
        return not self.chains_only and self.drafters <= 1

    def __str__(self) -> str:
        """For people, such as "chains, 2 target groups"; "nothing" if there are none."""
        found = []
        rules = [rule for rule in RULES if self.serve(rule)]
        if len(rules) < len(RULES.all()):
            found.append(f"the rule {' or '.join(rules)}")
        if self.chains_only:
            found.append("chains")
        if self.drafters > 1:
            found.append(f"{self.drafters} drafters")
        if self.groups > 1:
            found.append(f"{self.groups} target groups")
        return ", ".join(found) or "nothing"


class LookaheadPolicy(ABC):
    """One way to use the time while the target or the drafter works.

    Subclass it. An instance holds no state, because all sequences share it.
    """

    name: str
    """Its name in requests, files and tables."""

    help: str
    """One line for people, without a period at its end."""

    paper: str | None = None
    """Authors, year and place of its publication; None: it is not published."""

    needs: Needs = Needs()
    """What it asks of a request and of the layout."""

    drafts: bool = True
    """Whether a drafter is wanted."""

    drafting_is_free: bool = True
    """Whether the drafter works while the target is busy anyway."""

    waits: bool = False
    """Whether a sequence may miss a step to wait for its drafter."""

    grants_by_step: bool = False
    """Whether a grant depends on the window being verified, so that each step brings a new one."""

    fans_out: bool = False
    """Whether branches for other outcomes are held. A step verifies the chain of first ones."""

    spreads: bool = False
    """Whether several drafters may work for one sequence, and work moves between them."""

    replicates: bool = False
    """Whether several target groups may verify one sequence."""

    adapts: bool = False
    """Whether `auto` (auto/chooser.py) chooses policy and window for each sequence."""

    place_in_auto: int | None = None
    """`auto` compares policies in this order, and of equally good ones takes the first. None: it
    never takes this one. A subclass of a policy of ours inherits its place."""

    def __init_subclass__(cls) -> None:
        """Raise ConfigError for needs without which other requests would pay for this policy."""
        if cls.adapts:
            return  # It has the needs of what it chooses.
        if cls.fans_out and not (cls.needs.no_draft_probs or cls.needs.shared_noise):
            raise ConfigError(
                f"policy {cls.__name__}: branches have no draft probabilities; "
                "fans_out needs Needs(no_draft_probs=True)"
            )
        if cls.replicates and not (cls.needs.shared_noise and cls.needs.chains_only):
            raise ConfigError(
                f"policy {cls.__name__}: replicates needs "
                "Needs(shared_noise=True, chains_only=True)"
            )

    @abstractmethod
    def granted_candidates(self, view: DraftView) -> int:
        """The most candidates beyond the committed tokens, not counting branches."""

    def granted_branches(self, view: DraftView) -> int:
        """The most branches beside the chain (drafting.proto, Grant.fan_out), if `fans_out`."""
        return 0

    @abstractmethod
    def window(self, view: DraftView, now: float, wait_seconds: float) -> int | Wait:
        """How many candidates a step that starts now verifies, or until when to wait.

        `now`: seconds of the driver's clock. `wait_seconds`: the longest that a step may wait.
        """


def window_of(
    policy: LookaheadPolicy, view: DraftView, now: float, wait_seconds: float
) -> int | Wait:
    """What the policy answers for the next step, within the bounds of a window.

    If the policy raises, its sequence steps without candidates; nobody else pays for it.
    """
    try:
        window = policy.window(view, now, wait_seconds)
        if isinstance(window, Wait):
            return window
        most = MAX_WINDOW if policy.replicates else view.window
        return max(0, min(operator.index(window), most))
    except Exception:  # A policy may be of another package.
        _tell_failure(policy)
        return 0


def grant_of(policy: LookaheadPolicy, view: DraftView) -> tuple[int, int]:
    """The candidates and branches that the policy grants, within the bounds of the wire.

    If the policy raises, it grants nothing.
    """
    try:
        nodes = operator.index(policy.granted_candidates(view))
        branches = operator.index(policy.granted_branches(view)) if policy.fans_out else 0
    except Exception:  # As above.
        _tell_failure(policy)
        return 0, 0
    return max(0, min(nodes, _MOST_GRANTED)), max(0, min(branches, 2 * MOST_CHAINS))


def _tell_failure(policy: LookaheadPolicy) -> None:
    """Log the error that is being handled, once for each policy: it may come back in each step."""
    if policy.name not in _failed:
        _failed.add(policy.name)
        _log.exception("the policy %r failed; its sequences decode plainly", policy.name)


def await_candidates(view: DraftView, full: int, now: float, wait_seconds: float) -> int | Wait:
    """`full` candidates, or those that have arrived if no more will come or the wait is over."""
    give_up_at = view.ready_since + wait_seconds
    if view.num_candidates >= full or view.waits_in_vain or now >= give_up_at:
        return min(view.num_candidates, full)
    return Wait(give_up_at)


def forks_within(granted: int, *, pace: float, crowd: int) -> int:
    """How many positions of a chain may have branches beside them, given the chain's grant.

    `granted`: candidates that the chain may have. `pace`: the drafter's passes in the time of a
    step; 0: do not bound by it. `crowd`: sequences of the drafter, which share MOST_CHAINS.
    """
    if pace:
        granted = min(granted, max(2, round(2 * pace)))
    return min(granted, max(0, MOST_CHAINS // crowd - 1))


def _load_own() -> None:
    folder = import_module("cluster.decoding.policies").__path__
    for found in pkgutil.iter_modules(folder):
        import_module(f"cluster.decoding.policies.{found.name}")


POLICIES: Registry[LookaheadPolicy] = Registry(
    "policy", group="paceline.policies", load_own=_load_own
)
"""The policies by name: ours, and those of installed packages."""


def policy_named(name: str) -> LookaheadPolicy:
    """The policy of this name. Raises InvalidRequestError, which names the field `policy`."""
    return POLICIES.get(name, field="policy")

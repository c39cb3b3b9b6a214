"""What the scheduler knows of one sequence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from cluster.decoding.counts import Counts
from cluster.decoding.events import Request
from cluster.decoding.held_kv import HeldKv
from cluster.decoding.instructions import SequenceStats, Slice
from cluster.decoding.lookahead import LookaheadPolicy
from cluster.decoding.pilot import Pilot
from cluster.decoding.policies import PolicyName, policy_named
from cluster.decoding.timings import Mark, Shares, Utilisation
from cluster.decoding.token_tree import TokenTree
from paceline.rules import Rule
from workers.engine.shared_blocks import BlockKeys

CATCH_UP = 64
"""A group that others serve a sequence beside may lack so many tokens and still decode it."""


@dataclass(slots=True)
class Refusal:
    """A drafter declined a sequence. `is_over`: it may be asked again.

    That is at `again_at`, after `pause` seconds; math.inf: never, for it declined for good.
    """

    again_at: float
    pause: float
    is_over: bool = False


@dataclass(slots=True, eq=False)
class Sequence:
    """One stream of tokens being decoded. Mutable, owned by the scheduler."""

    request: Request
    admitted_at: float
    tree: TokenTree
    policy: LookaheadPolicy
    max_length: int
    """Most tokens that prompt and output may have."""
    # Most candidates that a step verifies.
    window: int
    # Of policy `auto`: what its controller keeps, and by which it changes policy and window.
    pilot: Pilot | None = None
    kv: HeldKv = field(default_factory=HeldKv)
    # Of policies that have several target groups verify it: where else it is.
    replicas: list[Replica] = field(default_factory=list)
    # By which its full blocks of committed tokens are known; None: nobody has asked.
    block_keys: BlockKeys | None = None
    cancelled: bool = False
    # Its caller does not read (events.Paused).
    paused: bool = False
    # Drafting.
    drafter: str | None = None
    helpers: list[str] = field(default_factory=list)
    """Further drafters, of policies that spread a sequence over several."""
    draft_limit: int = 0
    wants_top_tokens: bool = False
    granted_until: int = 0
    granted_nodes: int = 0
    granted_shares: int = 0
    granted_chains: int = 0  # chains and branches, of all its drafters
    # The most that any grant to its drafters allowed: what is under way when a grant shrinks must
    # be taken, for a drafter does not say again what it has said, and all after it hangs on it.
    ever_granted_until: int = 0
    ever_granted_nodes: int = 0
    draft_exhausted: bool = False
    declined_by: dict[str, Refusal] = field(default_factory=dict)
    ready_since: float = 0.0
    # How many candidates the last verdict left; passes of its drafter in the time of a step.
    kept: int = 0
    pace: float = 0.0
    crowd: int = 1
    # Counts.
    first_token_at: float | None = None
    counts: Counts = field(default_factory=Counts)
    first_tokens: int = 0
    since_first_token: Mark | None = None
    drafted_by: set[str] = field(default_factory=set)
    stopping_state: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def admitted(cls, request: Request, now: float) -> Sequence:
        """A sequence that has only its prompt."""
        return cls(
            request=request,
            admitted_at=now,
            tree=_tree_of(request, request.prompt_token_ids, request.prompt_hash),
            policy=policy_named(request.policy),
            max_length=len(request.prompt_token_ids) + request.max_tokens,
            window=request.window,
            pilot=Pilot.of(request) if request.policy is PolicyName.AUTO else None,
            ready_since=now,
        )

    @property
    def sequence_id(self) -> int:
        """The id of the request's sequence."""
        return self.request.sequence_id

    @property
    def team(self) -> list[str]:
        """All its drafters."""
        return [] if self.drafter is None else [self.drafter, *self.helpers]

    def forget_candidates(self) -> None:
        """Nothing was drafted for it."""
        width = self.tree.verified_width
        self.tree = _tree_of(self.request, self.tree.token_ids)
        self.tree.verified_width = width

    def forget_drafters(self) -> None:
        """It has none, and none was told anything."""
        self.drafter = None
        self.draft_limit = 0
        self.wants_top_tokens = False
        self.granted_until = self.granted_nodes = 0
        self.granted_shares = self.granted_chains = 0
        self.ever_granted_until = self.ever_granted_nodes = 0
        self.helpers = []
        self.pace = 0.0
        self.crowd = 1
        self.draft_exhausted = False

    def steer(self, pilot: Pilot) -> None:
        """Do as its pilot says from now on; in the midst of a step, not where that changes whether
        several groups verify it, for by this its verdict is read (answers.py).
        """
        changes_groups = pilot.policy.replicates is not self.policy.replicates
        if changes_groups and self.kv.in_flight is not None:
            return
        self.policy, self.window = pilot.policy, pilot.window
        if self.request.branches == 1 and not (self.request.merge or self.tree.chain):
            self.tree.verified_width = pilot.choice.width

    @property
    def order(self) -> tuple[float, int]:
        """Its place among all: who came first is served first."""
        return self.admitted_at, self.request.sequence_id

    @property
    def patience(self) -> float:
        """Seconds that a policy which waits may wait in a step, by what is known of drafters."""
        return math.inf if self.pilot is None else self.pilot.patience

    @property
    def lacking(self) -> int:
        """Committed tokens that have no KV, the last one among them."""
        return len(self.tree.token_ids) - self.kv.length

    @property
    def prefilling(self) -> bool:
        """It has not begun, or has no KV of more tokens than a decoding step feeds."""
        lacking = len(self.tree.token_ids) - self.kv.length
        if lacking > 1 and self.policy.replicates:
            return not self.kv.open_at_target or lacking > CATCH_UP
        return lacking > 1 or not self.kv.open_at_target

    @property
    def num_paths(self) -> int:
        """How many independent paths its windows are made of; 0: they are not (only k-SEQ's)."""
        return self.request.branches if self.request.spec.rule is Rule.KSEQ else 0

    @property
    def branches(self) -> int:
        """Candidates that its drafter may draw beside each other to be verified."""
        if self.pilot is None or self.tree.verified_width is None:
            return self.request.branches
        return max(self.request.branches, self.pilot.choice.width)

    @property
    def num_sharing(self) -> int:
        """Drafters that share its branches; those that are merged draft each for itself."""
        if self.request.merge:
            return int(self.drafter is not None)
        return (self.drafter is not None) + len(self.helpers)

    @property
    def slices_in_flight(self) -> list[Slice]:
        """Of all groups that serve it."""
        return [one.kv.in_flight for one in (self, *self.replicas) if one.kv.in_flight is not None]

    @property
    def useful_candidates(self) -> int:
        """Most candidates on a path: the verdict always adds a token of the target's."""
        most = min(self.max_length - 1, self.draft_limit) - len(self.tree.token_ids)
        return most if most > 0 else 0

    def forget_kv(self) -> None:
        """It runs nowhere, and its blocks are no longer its own: its next slice is the first."""
        self.kv = HeldKv()
        self.tree.unpin()

    def stats(self, now: float, utilisation: Utilisation) -> SequenceStats:
        """Its counts as of `now`, when it ends."""
        first, counts = self.first_token_at, self.counts
        shares = Shares()
        if self.since_first_token is not None:
            shares = utilisation.of_request(
                self.since_first_token,
                now,
                drafters=self.drafted_by,
                tokens=counts.committed - self.first_tokens,
                acceptance=counts.acceptance,
            )
        return SequenceStats(
            steps=counts.verdicts,
            drafted=counts.drafted,
            accepted=counts.accepted,
            output_tokens=counts.committed,
            seconds=now - self.admitted_at,
            ttft_seconds=None if first is None else first - self.admitted_at,
            stopping_state=self.stopping_state,
            speculation=replace(
                counts.speculation(),
                target_idle=shares.target_idle,
                drafter_idle=shares.drafter_idle,
                efficiency=shares.efficiency,
                choices={} if self.pilot is None else dict(self.pilot.choices),
                estimates={} if self.pilot is None else self.pilot.estimates,
            ),
        )


def _tree_of(
    request: Request, token_ids: Iterable[int], prefix_hash: int | None = None
) -> TokenTree:
    """These tokens, and no candidates yet."""
    policy = policy_named(request.policy)
    fans_out = policy.fans_out and request.spec.rule in policy_named(PolicyName.FANOUT).needs.rules
    return TokenTree(
        tuple(token_ids),
        prompt_hash=prefix_hash,
        chain=request.branches == 1 and not (fans_out or request.merge),
        verified_width=request.branches if fans_out or request.merge else None,
        merged=request.merge,
        most_draws=request.branches,
        counts_paths=request.spec.rule is Rule.KSEQ,
    )


@dataclass(slots=True, eq=False)
class Replica(Sequence):
    """A sequence on a further target group: the same tokens, KV of its own.

    What is known of drafting and what is counted is the first group's, `lead`.
    """

    lead: Sequence = field(kw_only=True)

    @classmethod
    def of(cls, lead: Sequence) -> Replica:
        """One that has no KV yet."""
        return cls(
            request=lead.request,
            admitted_at=lead.admitted_at,
            tree=lead.tree,
            policy=lead.policy,
            max_length=lead.max_length,
            window=lead.window,
            block_keys=lead.block_keys,
            lead=lead,
        )

    def forget_kv(self) -> None:
        """It runs here no more. What its lead has in a step is the lead's own affair."""
        self.kv = HeldKv()

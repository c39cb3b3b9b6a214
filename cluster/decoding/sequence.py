"""The scheduler's state of one sequence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field, replace

from cluster.decoding.auto.choices import Pilot
from cluster.decoding.counts import Counts
from cluster.decoding.events import Request
from cluster.decoding.instructions import Slice
from cluster.decoding.policies.fanout import FANOUT
from cluster.decoding.policy import DraftView, LookaheadPolicy, policy_named
from cluster.decoding.replicas import num_verifying
from cluster.decoding.timings import Mark, Shares, Utilization
from cluster.decoding.token_tree import TokenTree
from paceline.generation import RequestStats, TokenLogprobs
from workers.engine.kv_blocks import BlockKeys
from workers.verification.rule import CandidateKind, rule_named
from workers.verification.structure import Matcher

CATCH_UP = 64
"""The most tokens that a further group may lack and still decode a sequence."""


@dataclass(slots=True, eq=False)
class HeldKv:
    """KV of one sequence on one target group. Mutable, owned by the scheduler.

    A sequence that gives its blocks back gets a new HeldKv. A sequence that goes on in another
    group takes over that group's.
    """

    group: int | None = None
    """The group where the sequence runs; None: it waits."""
    length: int = 0
    """KV of all positions below is computed."""
    block_table: list[int] = field(default_factory=list)
    blocks_sent: int = 0
    """Leading blocks of the table that the shards know."""
    open_at_target: bool = False
    moves: tuple[tuple[int, int], ...] = ()
    """KV positions that its next slice moves before all else, as (from, to)."""
    in_flight: Slice | None = None
    blocks_kept: int = 0
    """Leading blocks that were offered to other sequences."""
    plain_until: float = math.inf
    """From here on the KV is not bit-equal to what prefill makes, so it is never shared."""


@dataclass(slots=True)
class Refusal:
    """A drafter declined a sequence.

    It is asked again at `again_at`, after `pause` seconds; math.inf: never, it declined for good.
    `is_over`: it may be asked now.
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
    """The most tokens that prompt and output may have together."""
    window: int
    """The most candidates that a step verifies."""
    # With policy `auto`: what sets its policy and window.
    pilot: Pilot | None = None
    kv: HeldKv = field(default_factory=HeldKv)
    # With policies that have several target groups verify a sequence: the further groups.
    replicas: list[Replica] = field(default_factory=list)
    # Keys of its full blocks of committed tokens; None: not computed yet.
    block_keys: BlockKeys | None = None
    # Log probabilities of the prompt that the caller got: those of tokens 1 to this number.
    prompt_logprobs_told: int = 0
    cancelled: bool = False
    # The caller does not read (events.Paused).
    paused: bool = False
    # Drafting.
    drafter: str | None = None
    helpers: list[str] = field(default_factory=list)
    """Further drafters, if the policy spreads a sequence or the request merges drafters."""
    draft_limit: int = 0
    wants_top_tokens: bool = False
    granted_until: int = 0
    granted_nodes: int = 0
    granted_shares: int = 0
    granted_chains: int = 0  # Chains and branches of all its drafters.
    # The most that any grant to its drafters allowed. Candidates on their way when a grant shrinks
    # must be taken: a drafter does not send them again, and everything after them builds on them.
    ever_granted_until: int = 0
    ever_granted_nodes: int = 0
    draft_exhausted: bool = False
    declined_by: dict[str, Refusal] = field(default_factory=dict)
    ready_since: float = 0.0
    # Candidates that the last verdict left; drafter's passes in the time of a step.
    kept: int = 0
    pace: float = 0.0
    crowd: int = 1
    # Of its structure, after the committed tokens; None: none, or it helps no more (structures.py).
    matcher: Matcher | None = None
    forced_until: int = 0
    """The structure alone decides the tokens below this position."""
    forced_ahead: Tokens[int] = ()
    """What it decides from there on, as far as it is known."""
    foretells: bool = False
    """Whether the request's prediction drafts for it. Then no drafter and no policy is asked."""
    # Counts.
    cached_tokens: int | None = None
    """Tokens of its prompt whose KV was there when it was first opened; None: it was not yet."""
    first_token_at: float | None = None
    counts: Counts = field(default_factory=Counts)
    first_tokens: int = 0
    since_first_token: Mark | None = None
    drafted_by: set[str] = field(default_factory=set)
    stopping_state: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def admitted(cls, request: Request, now: float) -> Sequence:
        """The sequence of a new request. It has its prompt, and output if it resumes another."""
        policy = policy_named(request.policy)
        token_ids = request.prompt_token_ids + request.output_token_ids
        return cls(
            request=request,
            admitted_at=now,
            tree=_tree_of(request, token_ids, request.prefix_hash),
            policy=policy,
            max_length=len(request.prompt_token_ids) + request.max_tokens,
            window=request.window,
            pilot=Pilot.of(request) if policy.adapts else None,
            ready_since=now,
            matcher=request.matcher if policy.drafts else None,
            foretells=_can_foretell(request, policy),
        )

    @property
    def sequence_id(self) -> int:
        return self.request.sequence_id

    @property
    def team(self) -> list[str]:
        return [] if self.drafter is None else [self.drafter, *self.helpers]

    def forget_candidates(self) -> None:
        width = self.tree.verified_width
        self.tree = _tree_of(self.request, self.tree.token_ids)
        self.tree.verified_width = width

    def forget_drafters(self) -> None:
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

    def make_ready(self, now: float) -> None:
        """A verdict was committed: the next step may begin."""
        self.ready_since = now
        self.draft_exhausted = False
        self.kept = self.tree.num_candidates

    def steer(self, pilot: Pilot) -> None:
        """Follow the pilot's policy and window from now on.

        During a step the sequence does not change to or from a policy that has several groups
        verify it, because that decides how the verdict is read (step_answers.py).
        """
        changes_groups = pilot.policy.replicates is not self.policy.replicates
        if changes_groups and self.kv.in_flight is not None:
            return
        self.policy, self.window = pilot.policy, pilot.window
        if self.request.branches == 1 and not (self.request.merge or self.tree.chain):
            self.tree.verified_width = pilot.choice.width

    @property
    def order(self) -> tuple[float, int]:
        """Sort key of the order of arrival, in which sequences are served."""
        return self.admitted_at, self.request.sequence_id

    @property
    def patience(self) -> float:
        """Seconds that a waiting policy may wait, by what is known of drafters."""
        return math.inf if self.pilot is None else self.pilot.patience

    @property
    def lacking(self) -> int:
        """Number of committed tokens without KV, the last one included."""
        return len(self.tree.token_ids) - self.kv.length

    @property
    def prefilling(self) -> bool:
        """Whether it has not begun, or lacks KV of more tokens than a decoding step feeds."""
        lacking = len(self.tree.token_ids) - self.kv.length
        if lacking > 1 and self.policy.replicates:
            return not self.kv.open_at_target or lacking > CATCH_UP
        return lacking > 1 or not self.kv.open_at_target

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether its caller asked for log probabilities of the prompt and lacks some.

        All of the prompt must then be computed, here and in this order.
        """
        request = self.request
        if request.spec.prompt_logprobs is None:
            return False
        return self.prompt_logprobs_told < len(request.prompt_token_ids) - 1

    def logprobs_of(self, start: int, end: int) -> tuple[int, ...]:
        """The prompt tokens after those at `start` to `end` - 1, if their log probabilities lack.

        The caller may have got those of the first ones before a preemption.
        """
        if not self.lacks_prompt_logprobs or end <= self.prompt_logprobs_told:
            return ()
        return self.request.prompt_token_ids[start + 1 : end + 1]

    def take_prompt_logprobs(
        self, start: int, found: tuple[TokenLogprobs, ...]
    ) -> tuple[TokenLogprobs, ...]:
        """Those that the caller lacks, of those found of the tokens from `start` + 1 on."""
        told = self.prompt_logprobs_told
        assert start <= told, "a prompt without some of its log probabilities"
        new = found[told - start :]
        self.prompt_logprobs_told = told + len(new)
        return new

    @property
    def num_paths(self) -> int:
        """Independent paths in a window, under a rule that counts them; 0: under other rules."""
        return self.request.branches if rule_named(self.request.spec.rule).counts_paths else 0

    @property
    def branches(self) -> int:
        """The most candidates at one position that its drafter may draw for verification."""
        if self.pilot is None or self.tree.verified_width is None:
            return self.request.branches
        return max(self.request.branches, self.pilot.choice.width)

    @property
    def num_sharing(self) -> int:
        """Drafters that share its branches. Merged drafters share none: each drafts for itself."""
        if self.request.merge:
            return int(self.drafter is not None)
        return (self.drafter is not None) + len(self.helpers)

    @property
    def view(self) -> DraftView:
        """What its policy sees. A replica shows what its lead shows."""
        return DraftView(self)

    @property
    def num_verifying(self) -> int | None:
        """Held candidates that its groups are verifying (replicas.py); None: no group is."""
        slices = [one.kv.in_flight for one in (self, *self.replicas)]
        return num_verifying(self.tree, [part for part in slices if part is not None])

    @property
    def useful_candidates(self) -> int:
        """The most useful candidates on a path. Each verdict also adds a token of the target."""
        limit = self.forced_until if self.drafter is None else self.draft_limit
        most = min(self.max_length - 1, limit) - len(self.tree.token_ids)
        return most if most > 0 else 0

    def forget_kv(self) -> None:
        """Forget its KV and blocks: it runs nowhere, and its next slice is the first."""
        self.kv = HeldKv()
        self.tree.unpin()

    def follow_prediction(self, num_new: int, kept: int | None = None) -> None:
        """Follow the newly committed tokens, and hold what the prediction foretells.

        `kept`: those up to the end of the sequence, which ends there; None: it goes on.
        """
        prediction = self.request.prediction
        if prediction is None:
            return
        tree = self.tree
        if kept is not None:
            end = tree.num_committed - num_new + kept
            prediction.advance(tree.token_ids[:end], kept)
            return
        prediction.advance(tree.token_ids, num_new)
        most = min(self.request.window, self.max_length - 1 - tree.num_committed)
        if not self.foretells or most <= 0:
            return
        foretold = prediction.foretold(most)
        self.forced_until = max(self.forced_until, tree.num_committed + len(foretold))
        tree.force(foretold, with_probs=False)

    def stats(self, now: float, utilization: Utilization) -> RequestStats:
        first, counts = self.first_token_at, self.counts
        prediction = self.request.prediction
        predicted = 0 if prediction is None else prediction.num_accepted
        shares = Shares()
        if self.since_first_token is not None:
            shares = utilization.of_request(
                self.since_first_token,
                now,
                drafters=self.drafted_by,
                tokens=counts.committed - self.first_tokens,
                acceptance=counts.acceptance,
            )
        return RequestStats(
            steps=counts.verdicts,
            drafted=counts.drafted,
            accepted=counts.accepted,
            acceptance_length=counts.committed / counts.verdicts if counts.verdicts else 0.0,
            seconds=now - self.admitted_at,
            ttft_seconds=0.0 if first is None else first - self.admitted_at,
            stopping_state=dict(self.stopping_state),
            accepted_prediction_tokens=predicted,
            rejected_prediction_tokens=0 if prediction is None else len(prediction) - predicted,
            cached_prompt_tokens=self.cached_tokens or 0,
            speculation=replace(
                counts.speculation(),
                target_idle=shares.target_idle,
                drafter_idle=shares.drafter_idle,
                efficiency=shares.efficiency,
                choices={} if self.pilot is None else dict(self.pilot.choices),
                estimates={} if self.pilot is None else self.pilot.estimates,
            ),
        )


def _can_foretell(request: Request, policy: LookaheadPolicy) -> bool:
    """Whether the request's prediction, if it has one, may draft for it.

    A prediction's tokens are not drawn, so the rule must be exact for such candidates.
    """
    if request.prediction is None or not policy.drafts or policy.replicates:
        return False
    return CandidateKind.DETERMINISTIC in rule_named(request.spec.rule).exact_for


def _tree_of(
    request: Request, token_ids: Iterable[int], prefix_hash: int | None = None
) -> TokenTree:
    """A tree with these committed tokens and no candidates."""
    fans_out = policy_named(request.policy).fans_out and FANOUT.needs.serve(request.spec.rule)
    return TokenTree(
        tuple(token_ids),
        prompt_hash=prefix_hash,
        chain=request.branches == 1 and not (fans_out or request.merge),
        verified_width=request.branches if fans_out or request.merge else None,
        merged=request.merge,
        most_draws=request.branches,
        counts_paths=rule_named(request.spec.rule).counts_paths,
    )


@dataclass(slots=True, eq=False)
class Replica(Sequence):
    """A sequence on a further target group: the same tokens, KV of its own.

    `lead` is the sequence on its first group. It holds drafters and counts for both.
    """

    lead: Sequence = field(kw_only=True)

    @classmethod
    def of(cls, lead: Sequence) -> Replica:
        return cls(
            request=lead.request,
            admitted_at=lead.admitted_at,
            tree=lead.tree,
            policy=lead.policy,
            max_length=lead.max_length,
            window=lead.window,
            block_keys=lead.block_keys,
            prompt_logprobs_told=lead.prompt_logprobs_told,
            lead=lead,
        )

    @property
    def view(self) -> DraftView:
        return DraftView(self.lead)

    def forget_kv(self) -> None:
        """Forget this group's KV. What the lead has in flight stays."""
        self.kv = HeldKv()

"""The drafters that can be used: which sequences each works for, and what it is told."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from cluster.decoding.events import DrafterJoined, StepDone, TopTokens
from cluster.decoding.instructions import (
    CloseDraft,
    Instruction,
    OpenDraft,
    SendGrant,
    SendOutcome,
    Suspect,
)
from cluster.decoding.policy import MOST_CHAINS, grant_of
from cluster.decoding.sequence import Refusal, Sequence
from cluster.decoding.timings import DriverShare, StepCosts
from cluster.decoding.token_tree import MAX_MERGED
from paceline.options import Stopping
from workers.drafting.tree import Grant
from workers.verification.rule import rule_named

_SLOW_CHANGE = 0.9
"""The weight of the mean duration of a drafter's passes when another pass is added."""

MALFORMED_LIMIT = 3
"""The number of malformed proposals that makes a drafter suspect."""

UNANSWERED_OUTCOMES, UNANSWERED_SECONDS = 4, 10.0
"""A drafter that answers none of this many outcomes for this many seconds is taken for dead. A live
drafter answers each outcome, even if only to say that it has nothing to propose."""

FIRST_REST, LONGEST_REST = 10.0, 60.0
"""Seconds for which a drafter that is taken for dead gets no work. The rest doubles each time."""

MESSAGE_ENTRIES = 4
"""Entries that each message counts in addition to those in it (drafting.proto, ProposalBatch)."""

FIRST_ALLOWANCE = 1024.0
"""Entries that a drafter may send beyond its grants. A drafter that keeps the contract needs none
of them."""

ALLOWED_ROUNDS = 8
"""Upper bound on unused allowance, in rounds. In a round, each sequence of the drafter gets one
outcome. A drafter uses one round while the next is on its way."""

SILENT_STEPS, SILENT_SECONDS = 16, 0.25
"""A drafter with work that sends nothing for this many steps and seconds is avoided, where work may
move to another drafter."""

FARTHER = 2
"""Sequences more that a drafter gets before one that is a step farther away gets one."""

_SHUNNED_SECONDS = 5.0
_FORGOTTEN_SECONDS = 5.0
_MUCH_SLOWER = 2.0
_AS_FAST = 1.5

FIRST_PAUSE, LONGEST_PAUSE = 2.0, 60.0
"""Seconds until a drafter that declined a sequence is asked again. The pause doubles each time."""

_TOKENS_A_MESSAGE = 8
"""The fewest tokens that a prefill pass feeds for each message it sends."""


@dataclass(slots=True)
class KnownDrafter:
    """One drafter: its own description, its number of sequences, and what was observed."""

    joined: DrafterJoined
    load: int = 0
    pass_ms: float = 0.0  # the mean of passes of all kinds; `auto` tells kinds apart (DraftTimes)
    malformed: int = 0
    heard_at: float = 0.0
    steps_unheard: int = 0
    shunned_until: float = 0.0
    # Outcomes that it has not answered, and the time since which it owes an answer.
    unanswered: int = 0
    owes_since: float | None = None
    rests_until: float | None = None
    rest: float = FIRST_REST
    # Entries that it may still send; the most entries that one call of `allow` added; the most
    # sequences that it had at that time.
    allowance: float = FIRST_ALLOWANCE
    most_granted: float = 0.0
    most_load: int = 0
    # Sequences that have left it since the last step.
    freed: int = 0

    def allow(self, entries: float) -> None:
        """Add to its allowance, because an outcome or a grant for a sequence was sent to it."""
        self.most_granted = max(self.most_granted, entries)
        self.most_load = max(self.most_load, self.load)
        most = FIRST_ALLOWANCE + ALLOWED_ROUNDS * self.most_granted * self.most_load
        if self.allowance < most:
            self.allowance = min(self.allowance + entries, most)

    @property
    def burden(self) -> int:
        """Its sequences, and those that nearer drafters may have more before it gets one."""
        return self.load + FARTHER * self.joined.distance

    def heard(self, now: float, pass_seconds: float, *, drafted: bool) -> None:
        """A pass of it took `pass_seconds`. `drafted`: it gave candidates."""
        self.heard_at, self.steps_unheard = now, 0
        self.unanswered, self.owes_since = 0, None
        if drafted:
            self.rest = FIRST_REST
        if drafted and pass_seconds > 0:
            kept = _SLOW_CHANGE if self.pass_ms else 0.0
            self.pass_ms = kept * self.pass_ms + (1 - kept) * 1000 * pass_seconds

    def stepped(self, now: float) -> None:
        """A step was answered: avoid it if it has work and has been silent for long.

        Forget its speed if it has had no work for long, since it may have changed.
        """
        if not self.load and now - self.heard_at >= _FORGOTTEN_SECONDS:
            self.pass_ms = 0.0
        self.steps_unheard += self.load > 0
        if self.steps_unheard >= SILENT_STEPS and now - self.heard_at >= SILENT_SECONDS:
            self.shunned_until = now + _SHUNNED_SECONDS

    def dies(self, now: float) -> bool:
        """Whether it has owed an answer for too long. It rests from now on."""
        if not self.unanswered:
            return False
        if self.owes_since is None:
            self.owes_since = now
        if self.unanswered < UNANSWERED_OUTCOMES or now - self.owes_since < UNANSWERED_SECONDS:
            return False
        self.unanswered, self.owes_since = 0, None
        self.rests_until = now + self.rest
        self.rest = min(2 * self.rest, LONGEST_REST)
        return True

    def rested(self, now: float) -> bool:
        """Whether it rested long enough. It may have work from now on."""
        if self.rests_until is None or self.rests_until > now:
            return False
        self.rests_until = None
        return True

    def fits(self, sequence: Sequence) -> bool:
        """Whether it can draft for this sequence at all."""
        request, own = sequence.request, self.joined
        return (
            sequence.tree.num_committed < own.max_position
            and request.spec.rule in own.rules
            and request.drafter_kind in (None, own.kind)
            and self.rests_until is None
            and (
                own.drafter not in sequence.declined_by or sequence.declined_by[own.drafter].is_over
            )
        )


def is_better(one: KnownDrafter, current: KnownDrafter, now: float) -> bool:
    """Whether work should move from `current` to `one`.

    It should if `current` is silent, much slower, or has at least two sequences more; or, if `one`
    is farther away, more than that.
    """
    if one.shunned_until > now:
        return False
    if current.shunned_until > now:
        return True
    if is_much_faster(one, current):
        return True
    return one.pass_ms <= _AS_FAST * current.pass_ms and one.burden + 2 <= current.burden


def is_much_faster(one: KnownDrafter, other: KnownDrafter) -> bool:
    """Whether passes of `one` are known to take less than half the time of the other's."""
    return 0 < _MUCH_SLOWER * one.pass_ms < other.pass_ms


class Drafters:
    """The drafters that can be used now. Methods append their instructions to `out`."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._driver = DriverShare()
        self._drafters: dict[str, KnownDrafter] = {}
        self.target_vocab_size = 0
        """Size of the target's vocabulary; 0: not known yet."""
        # When a drafter that declined may be asked again; None: none declined.
        self._ask_at: float | None = None

    def join(self, joined: DrafterJoined) -> None:
        """A drafter joined. It knows no sequence."""
        assert joined.drafter not in self._drafters, f"{joined.drafter} joined twice"
        self._drafters[joined.drafter] = KnownDrafter(joined, heard_at=joined.now)

    def lose(self, drafter: str, sequences: Iterable[Sequence]) -> None:
        """A drafter is gone, with all it knew. Losing it twice is no error."""
        self._drafters.pop(drafter, None)
        for sequence in sequences:
            sequence.declined_by.pop(drafter, None)
            self._leave(sequence, drafter)

    @property
    def names(self) -> Collection[str]:
        return self._drafters.keys()

    def heard(self, now: float, drafter: str, pass_seconds: float, *, drafted: bool) -> None:
        if (entry := self._drafters.get(drafter)) is not None:
            entry.heard(now, pass_seconds, drafted=drafted)

    def pace(self, drafter: str) -> float:
        """Passes of the drafter in the time of a step; 0: not known yet."""
        entry = self._drafters.get(drafter)
        return self._costs.step_ms / entry.pass_ms if entry is not None and entry.pass_ms else 0.0

    def has_model(self, drafter: str) -> bool:
        """Whether it drafts with a model, and so by the masks of structures."""
        return drafter in self._drafters and self._drafters[drafter].joined.has_model

    def has_joined(self, drafter: str) -> bool:
        return drafter in self._drafters

    def blame(self, drafter: str, sequences: Iterable[Sequence], out: list[Instruction]) -> None:
        """The drafter sent a malformed proposal. After MALFORMED_LIMIT of them it is lost."""
        if (blamed := self._drafters.get(drafter)) is None:
            return
        blamed.malformed += 1
        if blamed.malformed >= MALFORMED_LIMIT:
            self.lose(drafter, sequences)
            out.append(Suspect(drafter, f"{MALFORMED_LIMIT} of its proposals were malformed"))

    def told(
        self, drafter: str, entries: int, sequences: Iterable[Sequence], out: list[Instruction]
    ) -> None:
        """The drafter sent a message of `entries` entries. It is lost if it exceeds its grants."""
        if (entry := self._drafters.get(drafter)) is None:
            return
        entry.allowance -= MESSAGE_ENTRIES + entries
        if entry.allowance < 0:
            self.lose(drafter, sequences)
            out.append(Suspect(drafter, "it told more than it was granted"))

    def assign(self, sequence: Sequence, out: list[Instruction]) -> None:
        """Give the sequence a drafter that fits, if it wants one: a model, the least loaded."""
        if not sequence.policy.drafts or sequence.paused or sequence.foretells:
            return
        if sequence.drafter is not None:
            added = sequence.request.merge and self._add_kinds(sequence, out)
            if added or not sequence.granted_until:  # A drafter that took over has no grant yet.
                self.grant(sequence, out)
            return
        chosen = self._best_for(sequence)
        if chosen is None:
            self._note_refusals(sequence)
            return
        sequence.drafter = chosen.joined.drafter
        sequence.draft_limit = chosen.joined.max_position
        if not rule_named(sequence.request.spec.rule).shares_noise:
            # Candidates of two drafters, or of two draws, must not be siblings.
            sequence.tree.drop_run_ahead()
        self._open(sequence, chosen, out)
        if sequence.request.merge:
            self._add_kinds(sequence, out)
        self.grant(sequence, out)

    def _best_for(
        self, sequence: Sequence, *, other_than: Collection[str] = ()
    ) -> KnownDrafter | None:
        """The best drafter for the sequence among those that do not work for it; None: none can.

        `other_than`: kinds that it must not have.
        """
        able = [
            one
            for name, one in self._drafters.items()
            if name not in sequence.team
            and one.fits(sequence)
            and one.joined.kind not in other_than
        ]
        if not able:
            return None
        fastest = min((one.pass_ms for one in able if one.pass_ms), default=0.0)
        return min(
            able,
            key=lambda one: (
                not one.joined.has_model,
                one.shunned_until > sequence.ready_since,
                sequence.policy.spreads and one.pass_ms > _MUCH_SLOWER * fastest,
                one.burden,
                one.joined.drafter,
            ),
        )

    def _crowd(self, drafter: KnownDrafter) -> int:
        """The number of sequences among which a drafter's MOST_CHAINS are divided.

        At least its own sequences. More, if all drafters together would otherwise grow more chains
        than the driver has time to read.
        """
        shared = MOST_CHAINS * sum(one.load for one in self._drafters.values())
        return max(drafter.load, math.ceil(shared / self._driver.most_chains))

    def _add_kinds(self, sequence: Sequence, out: list[Instruction]) -> bool:
        """Add drafters of other kinds, up to MAX_MERGED. Returns whether any was added."""
        assert sequence.drafter is not None
        kinds = {self._drafters[name].joined.kind for name in sequence.team}
        before = len(kinds)
        while len(kinds) < MAX_MERGED:
            helper = self._best_for(sequence, other_than=kinds)
            if helper is None:
                break
            kinds.add(helper.joined.kind)
            sequence.helpers.append(helper.joined.drafter)
            self._open(sequence, helper, out)
        return len(kinds) > before

    def share_out(self, sequences: Collection[Sequence], out: list[Instruction]) -> None:
        """Give idle drafters to sequences that want several. `sequences`: the running ones.

        Drafters beyond the number of drafting sequences are shared out evenly.
        """
        takers = [one for one in sequences if one.policy.spreads and one.drafter is not None]
        takers = [one for one in takers if rule_named(one.request.spec.rule).shares_noise]
        if not takers:
            return
        drafting = sum(one.policy.drafts for one in sequences)
        spare = max(0, len(self._drafters) - drafting)
        for number, sequence in enumerate(takers):
            wanted = spare // len(takers) + (number < spare % len(takers))
            changed = len(sequence.helpers) != wanted
            while len(sequence.helpers) > wanted:
                self._close(sequence, sequence.helpers[-1], out)
            while len(sequence.helpers) < wanted:
                helper = self._best_for(sequence)
                if helper is None or helper.shunned_until > sequence.ready_since:
                    break
                sequence.helpers.append(helper.joined.drafter)
                self._open(sequence, helper, out)
            if changed:
                self.grant(sequence, out)

    def stepped(
        self, event: StepDone, sequences: Collection[Sequence], out: list[Instruction]
    ) -> None:
        """A step was answered. Move work away from drafters that are silent or slow."""
        now = event.now
        self._driver.answered(
            now,
            driver_seconds=event.driver_seconds,
            step_seconds=event.step_seconds,
            chains=sum(one.granted_chains for one in sequences),
        )
        for one in self._drafters.values():
            one.stepped(now)
        self._leave_the_dead(now, sequences, out)
        self._ask_again(now, sequences, out)
        if len(self._drafters) == 1:
            return
        for sequence in sequences:
            if sequence.policy.spreads and sequence.drafter is not None:
                self._move(now, sequence, out)
        self.share_out(sequences, out)

    def _leave_the_dead(
        self, now: float, sequences: Collection[Sequence], out: list[Instruction]
    ) -> None:
        """Take all work from drafters that answer nothing; give work to those that rested."""
        for name in [name for name, one in self._drafters.items() if one.dies(now)]:
            for sequence in sequences:
                if name in sequence.team:
                    self._close(sequence, name, out)
                    self.assign(sequence, out)
                    self.grant(sequence, out)
        if [one for one in self._drafters.values() if one.rested(now)]:
            for sequence in sequences:
                self.assign(sequence, out)

    def _ask_again(
        self, now: float, sequences: Collection[Sequence], out: list[Instruction]
    ) -> None:
        """Ask drafters again that declined: after a pause, or once another sequence left them."""
        freed = {name: one.freed for name, one in self._drafters.items() if one.freed}
        for name in freed:
            self._drafters[name].freed = 0
        if self._ask_at is None or (now < self._ask_at and not freed):
            return
        self._ask_at = None
        for sequence in sequences:
            asks = False
            for name, refusal in sequence.declined_by.items():
                if refusal.is_over or refusal.again_at == math.inf:
                    continue
                has_room = freed.get(name, 0) > 0
                if now >= refusal.again_at or has_room:
                    refusal.is_over = asks = True
                    freed[name] = freed.get(name, 0) - has_room
            if asks:
                self.assign(sequence, out)
            self._note_refusals(sequence)

    def _note_refusals(self, sequence: Sequence) -> None:
        """Note when the drafters that declined this sequence are to be asked again."""
        for refusal in sequence.declined_by.values():
            if not refusal.is_over and refusal.again_at < math.inf:
                self._ask_at = min(refusal.again_at, self._ask_at or math.inf)

    def _move(self, now: float, sequence: Sequence, out: list[Instruction]) -> None:
        """Change the sequence's drafters if others would do much better."""
        for name in [one for one in sequence.helpers if self._drafters[one].shunned_until > now]:
            self._close(sequence, name, out)
        assert sequence.drafter is not None
        current, best = self._drafters[sequence.drafter], self._best_for(sequence)
        if current.shunned_until > now and sequence.helpers:
            self._close(sequence, sequence.drafter, out)  # A helper takes its place.
            self.grant(sequence, out)
        elif best is not None and is_better(best, current, now):
            self._close(sequence, sequence.drafter, out)
            self.assign(sequence, out)
        elif sequence.helpers:
            self._lead_by_the_fast(sequence, current, out)

    def _lead_by_the_fast(
        self, sequence: Sequence, current: KnownDrafter, out: list[Instruction]
    ) -> None:
        """Let a much faster helper change places with the sequence's first drafter."""
        for place, name in enumerate(sequence.helpers):
            helper = self._drafters[name]
            if is_much_faster(helper, current):
                sequence.helpers[place] = current.joined.drafter
                sequence.drafter, sequence.draft_limit = name, helper.joined.max_position
                sequence.draft_exhausted = False
                sequence.granted_shares = 0  # Both drafters have other shares now.
                self.grant(sequence, out)
                return

    def _open(self, sequence: Sequence, chosen: KnownDrafter, out: list[Instruction]) -> None:
        chosen.load += 1
        chosen.allowance += len(sequence.tree.token_ids) * MESSAGE_ENTRIES / _TOKENS_A_MESSAGE
        chosen.heard_at = max(chosen.heard_at, sequence.ready_since)
        chosen.steps_unheard = 0
        sequence.wants_top_tokens |= chosen.joined.wants_top_tokens
        request = sequence.request
        out.append(
            OpenDraft(
                chosen.joined.drafter,
                sequence.sequence_id,
                request.spec,
                tuple(sequence.tree.token_ids),
                request.stopping,
                request.tenant,
                self.target_vocab_size,
            )
        )

    def _close(self, sequence: Sequence, drafter: str, out: list[Instruction]) -> None:
        out.append(CloseDraft(drafter, sequence.sequence_id))
        self._drafters[drafter].load -= 1
        self._drafters[drafter].freed += 1
        self._leave(sequence, drafter)

    def _leave(self, sequence: Sequence, drafter: str) -> None:
        """A drafter no longer works for the sequence. If it was the first, a helper replaces it."""
        if drafter in sequence.helpers:
            sequence.helpers.remove(drafter)
        elif sequence.drafter == drafter:
            helpers = sequence.helpers
            ever_granted = sequence.ever_granted_until, sequence.ever_granted_nodes
            sequence.forget_drafters()
            if helpers:
                sequence.drafter, *sequence.helpers = helpers
                team = [self._drafters[name].joined for name in helpers]
                sequence.draft_limit = team[0].max_position
                sequence.wants_top_tokens = any(one.wants_top_tokens for one in team)
                # Helpers had the same grants, and what they sent is not sent again.
                sequence.ever_granted_until, sequence.ever_granted_nodes = ever_granted
        sequence.granted_shares = 0  # The remaining drafters have other shares now.

    def grant(self, sequence: Sequence, out: list[Instruction]) -> None:
        """Send the sequence's drafters a grant, if it changed."""
        if sequence.drafter is None:
            return
        request = sequence.request
        drafter = self._drafters[sequence.drafter]
        sequence.pace = self.pace(sequence.drafter)
        if sequence.policy.fans_out:
            sequence.crowd = self._crowd(drafter)
        view = sequence.view
        nodes, branches = grant_of(sequence.policy, view)
        depth = min(nodes // (sequence.num_paths or 1), view.useful_candidates)
        # A branch is useful for one window after the token with which it begins.
        nodes += branches * (1 + sequence.window)
        until = sequence.tree.num_committed + depth
        by_cost = request.stopping is Stopping.COST
        team = sequence.team
        nodes += (len(team) - 1) * depth  # The chains of several drafters may differ.
        granted = (sequence.granted_until, sequence.granted_nodes, sequence.granted_shares)
        if nodes == 0 == sequence.granted_nodes and len(team) == sequence.granted_shares:
            return
        if (until, nodes, len(team)) == granted and not by_cost:
            return
        sequence.granted_until, sequence.granted_nodes = until, nodes
        sequence.ever_granted_until = max(sequence.ever_granted_until, until)
        sequence.ever_granted_nodes = max(sequence.ever_granted_nodes, nodes)
        sequence.granted_shares = len(team)
        sequence.granted_chains = len(team) + branches
        shares = sequence.num_sharing
        leave = _leave_to_tell(sequence)
        for share, name in enumerate(team):
            self._drafters[name].allow(leave)
            grant = Grant(
                until,
                branches=sequence.branches,
                nodes=nodes,
                tokens_per_ms=self._costs.tokens_per_ms if by_cost else 0.0,
                step_ms_per_candidate=self._costs.ms_per_candidate if by_cost else 0.0,
                drafting_is_free=sequence.policy.drafting_is_free,
                fan_out=branches,
                share=share if shares > 1 else 0,
                shares=shares if shares > 1 else 0,
            )
            out.append(SendGrant(name, sequence.sequence_id, grant))

    def outcome(
        self,
        sequence: Sequence,
        position: int,
        token_ids: tuple[int, ...],
        top_tokens: tuple[TopTokens, ...],
        out: list[Instruction],
    ) -> None:
        """Tell the drafters what was committed, and how far they may go now."""
        if sequence.drafter is None:
            return
        leave = _leave_to_tell(sequence) + MESSAGE_ENTRIES * len(token_ids)
        for name in sequence.team:
            self._drafters[name].allow(leave)
            out.append(SendOutcome(name, sequence.sequence_id, position, token_ids, top_tokens))
        self.grant(sequence, out)
        if sequence.granted_nodes and sequence.granted_until > sequence.tree.num_committed:
            for name in sequence.team:
                self._drafters[name].unanswered += 1

    def teach(
        self, sequence: Sequence, top_tokens: tuple[TopTokens, ...], out: list[Instruction]
    ) -> None:
        """Tell the drafters that ask for it which tokens the target finds likely in the prompt."""
        position = sequence.tree.num_committed
        for name in sequence.team:
            if self._drafters[name].joined.wants_top_tokens:
                out.append(SendOutcome(name, sequence.sequence_id, position, (), top_tokens))

    def decline(
        self,
        now: float,
        drafter: str,
        sequence: Sequence,
        out: list[Instruction],
        *,
        for_good: bool = False,
    ) -> None:
        """A drafter declined the sequence. Another may take it; this one is asked again later."""
        before = sequence.declined_by.get(drafter)
        pause = FIRST_PAUSE if before is None else before.pause
        if before is not None and before.is_over:
            pause = min(2 * pause, LONGEST_PAUSE)
        again_at = math.inf if for_good else now + pause
        sequence.declined_by[drafter] = Refusal(again_at, pause)
        self._note_refusals(sequence)
        if drafter in sequence.team:
            self._drafters[drafter].load -= 1
            self._leave(sequence, drafter)
            self.assign(sequence, out)
            self.grant(sequence, out)

    def release(self, sequence: Sequence, out: list[Instruction]) -> None:
        for name in reversed(sequence.team):
            self._close(sequence, name, out)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        counted = dict.fromkeys(self._drafters, 0)
        for sequence in sequences:
            assert sequence.drafter not in sequence.helpers
            for name in sequence.team:
                counted[name] += 1
        assert counted == {name: one.load for name, one in self._drafters.items()}


def _leave_to_tell(sequence: Sequence) -> float:
    """The most entries that a drafter may tell of a sequence before the next outcome.

    Each granted node comes once, at worst as a message with one proposal of one token. A last
    message has no proposal. If the drafter sends distributions, of 64 pairs each, the other nodes
    of a tree may come again with each distribution.
    """
    most = 1 + sequence.granted_nodes
    if not rule_named(sequence.request.spec.rule).needs_draft_probs:
        return (MESSAGE_ENTRIES + 3.0) * most
    return (MESSAGE_ENTRIES + 27.0) * most * (1 if sequence.tree.chain else most)

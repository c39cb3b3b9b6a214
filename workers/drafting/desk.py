"""The open sequences of all streams of a drafter, and passes over them. No I/O, no clock.

Each stream has a DraftingSession of its own. A pass drafts for every sequence that has room to
draft. Several parties that use the drafter share its passes, places and memory (fair_shares.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from paceline.errors import OverloadedError, ProtocolError
from paceline.options import Stopping
from paceline.sampling import SequenceSpec
from workers.drafting.fair_shares import Share, Shares
from workers.drafting.kind import (
    Draft,
    Learns,
    Pass,
    Proposer,
    TopTokens,
    reason_of_failure,
)
from workers.drafting.proposal import Proposal, proposals_of
from workers.drafting.tree import PIECE, DraftTree, Grant, Kept, NewNodes

MAX_GRANTED = 1 << 16
"""Most candidates, branches or fan-out of a grant. Trees of 64 candidates a step need thousands."""

QUIET_SECONDS = 0.0001
QUIET_SECONDS_OF_MANY = 0.0003
"""Seconds without a message after which a pass begins, for one open sequence and for several. gRPC
delivers messages one by one, and one pass should use all messages that a step caused.
"""
_SLOW_CHANGE = 0.8
"""Weight of the old value in the moving average of a pass's duration."""
_KEPT = 0.8
"""Weight of the old value in the moving average of the time between outcomes."""
_PAUSE = 4.0
"""A gap above this multiple of the average is ignored as a pause: requests came or went."""
_LENT = "another driver needs its share of this drafter"
"""Why a sequence is declined whose place or memory was lent."""
_PATIENCE = 0.3
"""Maximum lateness of an outcome for which a pass is held, as a share of a pass's duration."""


@dataclass(slots=True)
class Rhythm:
    """Predicts when the next outcome of one driver comes: outcomes come once per step.

    Suppose an outcome refuses the draft that a running pass continues. The next pass, which begins
    where the text really continues, then begins late. So it is better to delay a pass during which
    an outcome is expected, unless its draft is likely enough to be right. Times are seconds of the
    drafter's clock.
    """

    _last: float | None = None
    _period: float = 0.0

    def beat(self, now: float) -> None:
        """Note that an outcome came at time `now`."""
        if self._last is not None:
            since = now - self._last
            if not self._period:
                self._period = since
            elif since < _PAUSE * self._period:
                self._period = _KEPT * self._period + (1 - _KEPT) * since
        self._last = now

    def share_after(self, now: float, pass_seconds: float) -> float:
        """The share, 0 to 1, of a pass from `now` on that would lie after the next outcome.

        It is 0 too if the outcome is overdue, since the time of its arrival is then unknown.
        """
        if self._last is None or not self._period or not pass_seconds:
            return 0.0
        left = self._last + self._period - now
        if left >= pass_seconds or now >= self.give_up_at(pass_seconds):
            return 0.0
        return min(1.0, 1 - left / pass_seconds)

    def give_up_at(self, pass_seconds: float) -> float:
        """The time until which a pass is delayed for the next outcome."""
        assert self._last is not None
        return self._last + self._period + _PATIENCE * pass_seconds


@dataclass(frozen=True, slots=True)
class Declined:
    """A sequence that was closed, and why. `for_good`: it would be declined again at any time."""

    sequence_id: int
    reason: str
    for_good: bool = False


@dataclass(frozen=True, slots=True)
class SessionNews:
    """What a pass produced for one session."""

    session: DraftingSession
    tokens_fed: int
    proposals: list[Proposal] = field(default_factory=list)
    declined: list[Declined] = field(default_factory=list)


class DraftingSession:
    """The sequences of one stream. Made by DraftingDesk.open_session.

    The methods follow the messages of drafting.proto. A message about a sequence that is not open
    does nothing; one that breaks the contract raises ProtocolError.
    """

    def __init__(self, desk: DraftingDesk, share: Share, owner: str) -> None:
        """`owner`: whose tenants its tenants are; another owner's of the same name are others."""
        self._desk = desk
        self.share = share
        self._owner = owner
        self.vocab_size = desk.info.vocab_size
        self.trees: dict[int, DraftTree] = {}
        self.rhythm = Rhythm()
        self._had_outcome = False

    def open(
        self,
        sequence_id: int,
        spec: SequenceSpec,
        token_ids: Sequence[int],
        *,
        vocab_size: int | None = None,
        stopping: Stopping = Stopping.FIXED,
        tenant: str = "",
    ) -> Declined | None:
        """Open a sequence, in place of an open one with the same id. Returns a refusal or None.

        `vocab_size`: the target's number of token ids; None: unbounded. Raises ProtocolError.
        """
        self.close(sequence_id)
        self._desk.changed()
        if not 1 <= spec.prompt_length <= len(token_ids):
            raise ProtocolError(
                f"open.spec.prompt_length: expected 1 to {len(token_ids)}, the number of tokens, "
                f"got {spec.prompt_length}"
            )
        never = self._desk.reason_never_to_take(token_ids, spec)
        if never is not None:
            return Declined(sequence_id, never, for_good=True)
        if self._desk.is_full and not self._desk.take_place(self.share):
            most = self._desk.max_sequences
            reason = f"{most} sequences are open, the most that this drafter takes"
            return Declined(sequence_id, reason)
        tree = DraftTree(
            spec,
            token_ids,
            max_position=self._desk.info.max_position,
            vocab_size=vocab_size,
            stopping=stopping,
            tenant=f"{len(self._owner)} {self._owner} {tenant}",
        )
        while True:
            try:
                self._desk.proposer.open(tree)
                break
            except OverloadedError as error:
                if not self._desk.take_memory(self.share, tree.num_committed):
                    return Declined(sequence_id, f"the drafter's KV memory is full: {error}")
            except Exception as error:  # Of one sequence: others go on.
                return Declined(sequence_id, reason_of_failure(error))
        self.trees[sequence_id] = tree
        self._desk.opened(self, sequence_id, tree)
        return None

    def outcome(
        self,
        sequence_id: int,
        position: int,
        token_ids: Sequence[int],
        top_tokens: Sequence[TopTokens] = (),
    ) -> Declined | None:
        """Commit `token_ids` and learn from `top_tokens`. The subtree that agrees stays.

        `token_ids` may be empty if there are `top_tokens`. Returns a refusal if the drafter cannot
        continue the sequence, else None. Raises ProtocolError.
        """
        if not (token_ids or top_tokens):
            raise ProtocolError("outcome.token_ids: expected at least one token")
        tree = self.trees.get(sequence_id)
        if tree is None or not (token_ids or self._desk.info.wants_top_tokens):
            return None
        if token_ids:
            self._had_outcome = True
            self._desk.changed()
        foreign = self._desk.reason_not_to_know(token_ids)
        if foreign is not None:
            self.close(sequence_id)
            return Declined(sequence_id, foreign, for_good=True)
        try:
            if token_ids:
                kept = tree.outcome(position, token_ids)
            else:
                kept = Kept((), (), tuple(range(1, tree.num_nodes + 1)), agreed=True)
            self._desk.proposer.committed(tree, kept, top_tokens)
        except ProtocolError:
            raise
        except Exception as error:  # Of one sequence: others go on.
            self.close(sequence_id)
            return Declined(sequence_id, reason_of_failure(error))
        return None

    def grant(self, sequence_id: int, grant: Grant) -> None:
        """Replace the sequence's grant. Raises ProtocolError for values out of range."""
        if grant.branches < 1:
            raise ProtocolError(f"grant.branches: expected at least 1, got {grant.branches}")
        for name in ("branches", "nodes", "fan_out"):
            if (value := getattr(grant, name)) > MAX_GRANTED:
                raise ProtocolError(f"grant.{name}: expected at most {MAX_GRANTED}, got {value}")
        if grant.share >= max(1, grant.shares):
            raise ProtocolError(
                f"grant.share: expected less than grant.shares ({grant.shares}), got {grant.share}"
            )
        tree = self.trees.get(sequence_id)
        if tree is not None:
            if grant.fan_out and tree.needs_draft_probs:
                raise ProtocolError(
                    f"grant.fan_out: expected 0 for the rule {tree.spec.rule!r}, whose "
                    f"outcomes a drafter cannot foresee, got {grant.fan_out}"
                )
            tree.set_grant(grant)
            self._desk.changed()

    def handled(self, now: float) -> None:
        """Call it after a message was applied, at time `now`: its outcomes count as one beat."""
        if self._had_outcome:
            self._had_outcome = False
            self.rhythm.beat(now)

    def close(self, sequence_id: int) -> None:
        tree = self.trees.pop(sequence_id, None)
        if tree is not None:
            self._desk.closed(self, tree)


class DraftingDesk:
    """Drafts for the sessions of all streams with one proposer. Not thread-safe."""

    def __init__(self, proposer: Proposer, *, max_sequences: int) -> None:
        self.proposer = proposer
        self.info = proposer.info
        self.max_sequences = max_sequences
        self.shares = Shares()
        self._sessions: list[DraftingSession] = []
        # The open sequences by their trees, in the order in which they were opened.
        self._places: dict[DraftTree, tuple[DraftingSession, int]] = {}
        self._taken_back: list[tuple[DraftingSession, Declined]] = []
        self._pass_ms = 0.0
        self._held_until: float | None = None  # The first end of the delay of the next pass.
        self._drafted_only = False
        self.opening: list[DraftTree] = []
        """Long texts that are being read, one piece per pass, the oldest first."""
        # Cached, since a pass reads it several times; None after a change.
        self._ready: list[tuple[DraftingSession, DraftTree]] | None = None

    def changed(self) -> None:
        """Drop the cached list of ready trees, after a sequence was opened, closed or changed."""
        self._ready = None

    def open_session(self, party: str = "", *, driver: str = "") -> DraftingSession:
        """Open a session for a stream.

        `party`: whose stream it is. All streams of a party have one share, and its tenants; "": a
        share of its own, and the tenants of the `driver` of this name.
        """
        share = next((one for one in self.shares.all if party and one.name == party), None)
        owner = f"party {party}" if party else f"driver {driver}"
        session = DraftingSession(self, share or self.shares.join(party, party or driver), owner)
        self._sessions.append(session)
        return session

    def opened(self, session: DraftingSession, sequence_id: int, tree: DraftTree) -> None:
        self._places[tree] = session, sequence_id
        self.shares.opened(session.share, tree)
        if not tree.is_settled:
            self.opening.append(tree)

    def closed(self, session: DraftingSession, tree: DraftTree) -> None:
        if not tree.is_settled:
            self.opening.remove(tree)
        del self._places[tree]
        self.shares.closed(session.share, tree)
        self.changed()
        self.proposer.close(tree)

    def take_place(self, share: Share) -> bool:
        """Make room for a sequence of `share`, if another share uses more than it. Else False."""
        return self._take_back(self.shares.lender_of_a_place(share))

    def take_memory(self, share: Share, tokens: int) -> bool:
        """Free memory for `tokens` of `share`, if another share uses more than it. Else False.

        It may be too little: then call it again.
        """
        return self._take_back(self.shares.lender_of_memory(share, tokens))

    def _take_back(self, lender: Share | None) -> bool:
        """Close the newest sequence of `lender`."""
        if lender is None:
            return False
        tree = next(tree for tree in reversed(self._places) if tree in lender.queue)
        session, sequence_id = self._places[tree]
        session.close(sequence_id)
        lender.declined += 1
        self._taken_back.append((session, Declined(sequence_id, _LENT)))
        return True

    def taken_back(self) -> list[tuple[DraftingSession, Declined]]:
        """The sequences that were closed for the sake of other shares since the last call."""
        found, self._taken_back = self._taken_back, []
        return found

    def close_session(self, session: DraftingSession) -> None:
        """Forget a stream and everything kept for it. Closing it again does nothing."""
        self.changed()
        for sequence_id in list(session.trees):
            session.close(sequence_id)
        if session in self._sessions:
            self._sessions.remove(session)
            if all(one.share is not session.share for one in self._sessions):
                self.shares.leave(session.share)

    @property
    def has_work(self) -> bool:
        """Whether a pass would produce something."""
        if self.opening or self._ready_trees():
            return True
        return any(tree.wants_last for _, _, tree in self._all_trees())

    @property
    def num_open(self) -> int:
        return sum(len(session.trees) for session in self._sessions)

    @property
    def is_full(self) -> bool:
        return self.num_open >= self.max_sequences

    def reason_not_to_know(self, token_ids: Sequence[int]) -> str | None:
        """Why nothing can be drafted after these tokens, or None.

        A target with the same tokenizer may have a larger vocabulary, because vocabularies are
        padded.
        """
        known = self.info.vocab_size
        if not known or max(token_ids, default=0) < known:
            return None
        return f"token id {max(token_ids)} is not in the drafter's vocabulary of {known}"

    def reason_never_to_take(self, token_ids: Sequence[int], spec: SequenceSpec) -> str | None:
        """Why this drafter can never draft for a sequence with these tokens, or None."""
        num_tokens = len(token_ids)
        if spec.rule not in self.info.rules:
            served = ", ".join(sorted(repr(rule) for rule in self.info.rules))
            return (
                f"a drafter of kind {self.info.kind!r} cannot draft for the rule "
                f"{spec.rule!r}; it can for {served}"
            )
        if num_tokens >= self.info.max_position:
            return f"{num_tokens} tokens leave no room in a context of {self.info.max_position}"
        return self.reason_not_to_know(token_ids)

    def hold_until(self, now: float) -> float | None:
        """The time until which to delay the next pass for the next outcomes; None: begin it now.

        Suppose outcomes arrive in the middle of a pass. The part of the pass before them is useful
        if its draft is right, and the part after them is lost if the draft is wrong. So the pass is
        delayed if the chance that the draft is right is below the share of the pass that would lie
        after the outcomes.
        """
        ready = self._ready_trees()
        sessions = {session for session, _ in ready}
        if len(sessions) != 1:
            return None  # the outcomes of several drivers have no common rhythm
        (session,) = sessions
        pass_seconds = self._pass_ms / 1000
        share_after = session.rhythm.share_after(now, pass_seconds)
        if not share_after or not all(tree.grant.drafting_is_free for _, tree in ready):
            return None
        promise = sum(self.proposer.promise(tree) for _, tree in ready) / len(ready)
        if promise >= share_after:
            return None
        until = session.rhythm.give_up_at(pass_seconds)
        # A pass that takes longer than from one outcome to the next would be delayed for ever.
        self._held_until = until if self._held_until is None else self._held_until
        return until if now < self._held_until else None

    def run_pass(self) -> list[SessionNews]:
        """Draft once for the sequences that have room and whose turn it is."""
        failures = Pass()
        self._held_until = None
        settled_some = self._settle_some(failures)
        first_new = {tree: len(tree.tokens) for _, tree in self._ready_trees()}
        self.changed()
        for tree in first_new:
            try:
                self._extend_by_what_is_at_hand(tree)
            except Exception as error:  # Of one sequence: others go on.
                failures.fail(tree, error)
        failed = dict(failures.declined)
        ready = [tree for tree in first_new if tree not in failed]
        ready = [] if settled_some and self.shares.contended else self._whose_turn_it_is(ready)
        result = self.proposer.run_pass(ready, pass_ms=self._pass_ms)
        drafts = {draft.tree: draft for draft in result.drafts}
        self._drafted_only = result.tokens_fed > 0 and not (result.prefilled or settled_some)
        took_part = set(result.took_part)
        self.shares.passed(
            [(self._places[tree][0].share, tree) for tree in ready if tree in took_part],
            result.fed,
            drafts,
        )
        short = [
            (tree, reason)
            for tree, reason in result.short
            if tree in self._places and not self.take_memory(self._places[tree][0].share, 1)
        ]
        declined = failed | dict(result.declined) | dict(short)
        news: dict[DraftingSession, SessionNews] = {}
        for session, sequence_id, tree in list(self._all_trees()):
            draft = drafts.get(tree)
            first = first_new.get(tree)
            if draft is None:
                if (first is not None and first < len(tree.tokens)) or tree.wants_last:
                    draft = Draft(tree, NewNodes())
                elif tree not in took_part and tree not in declined:
                    continue
            mine = news.get(session)
            if mine is None:
                mine = news[session] = SessionNews(session, result.tokens_fed)
            if declined and tree in declined:
                mine.declined.append(Declined(sequence_id, declined[tree]))
                session.close(sequence_id)
            elif draft is not None:
                first = len(tree.tokens) if first is None else first
                try:
                    tree.extend(draft.new)
                    if not (draft.last or draft.grant_used):
                        self._extend_by_what_is_at_hand(tree)
                    mine.proposals.extend(proposals_of(sequence_id, draft, first))
                except Exception as error:  # Of one sequence: others go on.
                    mine.declined.append(Declined(sequence_id, reason_of_failure(error)))
                    session.close(sequence_id)
        return list(news.values())

    def learn(self) -> bool:
        """Use a moment without work, if the proposer can. Returns whether it can use more."""
        return isinstance(self.proposer, Learns) and self.proposer.learn()

    def _whose_turn_it_is(self, ready: Sequence[DraftTree]) -> list[DraftTree]:
        """Those of the ready trees that take part in the next pass."""
        of: dict[Share, list[DraftTree]] = {}
        for tree in ready:
            of.setdefault(self._places[tree][0].share, []).append(tree)
        return self.shares.choose(of) if of else []

    def _settle_some(self, failures: Pass) -> bool:
        """Read at most PIECE tokens of long texts, if it is the turn of a share that has some.

        Returns whether it is. If several shares are in use, the pass does nothing else.
        """
        if not self.opening:
            return False
        waiting = {self._places[tree][0].share for tree in self.opening}
        waiting |= {session.share for session, _ in self._ready_trees()}
        owner = self.shares.begin(waiting)
        mine = [tree for tree in self.opening if tree in owner.queue]
        left = PIECE
        for tree in mine:
            count = min(left, tree.num_committed - tree.num_settled)
            try:
                self.proposer.settle(tree, count)
            except Exception as error:  # Of one sequence: others go on.
                failures.fail(tree, error)
                continue
            tree.settle(count)
            left -= count
            if not tree.is_settled:
                break
            self.opening.remove(tree)
        self.changed()
        return bool(mine)

    def _extend_by_what_is_at_hand(self, tree: DraftTree) -> None:
        """Add the nodes that the proposer has without a pass (Proposer.at_hand)."""
        while tree.ready:
            known = self.proposer.at_hand(tree)
            if not known.token_ids:
                return
            tree.extend(known)

    def pass_took(self, milliseconds: float) -> None:
        """Note the duration of the last pass, the price of drafting. Prefill is ignored.

        The shares that took part pay for it.
        """
        self.shares.pass_took(milliseconds)
        if self._drafted_only:
            kept = _SLOW_CHANGE if self._pass_ms else 0.0
            self._pass_ms = kept * self._pass_ms + (1 - kept) * milliseconds

    def check_integrity(self) -> None:
        """Assert that the trees, and the state that the proposer keeps for them, match."""
        trees = [tree for _, _, tree in self._all_trees()]
        for tree in trees:
            tree.check_integrity()
        unsettled = {tree for tree in trees if not tree.is_settled}
        assert set(self.opening) == unsettled
        assert len(self.opening) == len(unsettled)
        assert set(self._places) == set(trees)
        assert {tree for share in self.shares.all for tree in share.queue} == set(trees)
        self.shares.check_integrity()
        self.proposer.check_integrity(trees)

    def _ready_trees(self) -> list[tuple[DraftingSession, DraftTree]]:
        if self._ready is None:
            self._ready = [
                (session, tree)
                for session in self._sessions
                for tree in session.trees.values()
                if tree.ready
            ]
        return self._ready

    def _all_trees(self) -> Iterator[tuple[DraftingSession, int, DraftTree]]:
        for session in self._sessions:
            for sequence_id, tree in session.trees.items():
                yield session, sequence_id, tree

"""The law of what is served, by enumeration, with the real scheduler, drafting desk and rules.

Only randomness is replaced. Every number that production takes from (seed, position, purpose,
candidate, prefix) falls on each of its sides in turn, once for each such name. A number that is
asked for again is the same, so a coin that is used twice shows in the law.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from cluster.decoding.events import (
    Admitted,
    DraftDeclined,
    DrafterJoined,
    DrafterLost,
    Event,
    Paused,
    Proposal,
    Proposed,
    Request,
    Resumed,
    SequenceVerdict,
    StepDone,
    TargetJoined,
    TargetLost,
    Tick,
    TopTokens,
)
from cluster.decoding.instructions import (
    CloseDraft,
    Emit,
    Finish,
    OpenDraft,
    RunStep,
    SendGrant,
    SendOutcome,
    Slice,
    WakeAt,
)
from cluster.decoding.scheduler import Scheduler
from paceline.options import Stopping
from paceline.sampling import SamplingParams, SequenceSpec
from tests.cluster.decoding.law_coins import NamedCoins, WindowCoins, draw_with
from tests.cluster.decoding.law_drafter import PROMPT
from tests.cluster.decoding.law_faults import (
    BrokenStream,
    DrafterFault,
    Fault,
    Pause,
    Preemption,
    TargetFault,
    Way,
)
from tests.workers.verification.enumeration import Coins, Prefix, TinyModels
from workers.drafting import kind as drafter_kind
from workers.drafting.desk import DraftingDesk
from workers.verification.candidates import CandidateTree, DraftProbs, check_proposal
from workers.verification.rule import RuleNode
from workers.verification.verify import Coins as WalkCoins
from workers.verification.verify import begin_node, walk

ELDER, OURS = 1, 2
"""Ids of the older sequence that may take blocks, and of the one whose law is enumerated."""

MakeProposer = Callable[[], drafter_kind.Proposer]
"""Starts a drafter that has learned nothing."""


@dataclass(frozen=True)
class Timing:
    """When passes come: `during` a step, of which `late` arrive only after it."""

    during: int
    late: int = 0


class Drafter:
    """A drafter's process: production's desk with one stream."""

    def __init__(self, make: MakeProposer) -> None:
        self.desk = DraftingDesk(make(), max_sequences=1)
        self.session = self.desk.open_session()

    def draft(self) -> tuple[Proposal, ...]:
        """Run one pass and return its proposals."""
        if not self.desk.has_work:
            return ()
        return tuple(
            Proposal(
                made.sequence_id,
                made.base_length,
                made.base_hash,
                made.token_ids,
                made.last,
                made.parents,
                made.multiplicities,
                made.distributions,
            )
            for news in self.desk.run_pass()
            for made in news.proposals
        )


@dataclass
class Served:
    """The law [V] * length of the first tokens, over all coins, and counts of what happened."""

    law: NDArray[np.float64]
    windows: list[Slice] = field(default_factory=list)
    preempted_with: list[int] = field(default_factory=list)
    """The number of candidates that were held each time that the sequence lost its blocks."""
    branch_hits: int = 0
    """The number of verdicts that were held as a branch beside the chain."""


@dataclass
class LawWorld:
    """Serves one request once, with coins that fall as `named` says.

    `makes`: the drafters by name. The first one works for the sequence as long as it can.
    """

    models: TinyModels
    request: Request
    named: NamedCoins
    timing: Timing
    makes: Mapping[str, MakeProposer]
    fault: Fault | None = None
    found: Served = field(default_factory=lambda: Served(np.zeros(())))
    text: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._scheduler = Scheduler(prefix_cache=False)
        self._drafters: dict[str, Drafter] = {}
        self._step: RunStep | None = None
        self._num_steps = 0
        self._finished = False
        self._now = 0.0

    def serve(self, length: int) -> tuple[int, ...]:
        """Serve the request, and return the first `length` tokens of its text."""
        self._join_target()
        for name in self.makes:
            self._join_drafter(name)
        if isinstance(self.fault, Preemption):
            self._send(Admitted(0.0, _elder(self.fault)))
        self._send(Admitted(0.0, self.request))
        while len(self.text) < length and not self._finished:
            if self._step is None:
                if not self._deliver(self._draft()):
                    self._now += 10.0
                    self._send(Tick(self._now))
                continue
            late = self._passes_in_step()
            fault = self.fault
            target_ends = isinstance(fault, TargetFault) or (
                isinstance(fault, DrafterFault) and fault.target_away
            )
            if target_ends and fault is not None and self._is_due(fault):
                self._lose_target(fault if isinstance(fault, TargetFault) else TargetFault(0))
                continue
            if isinstance(fault, BrokenStream) and self._is_due(fault) and self._breaks(fault):
                self._resume()
                continue
            paused = isinstance(fault, Pause) and self._is_due(fault)
            if paused:
                self._send(Paused(self._now, OURS))
            step, self._step = self._step, None
            verdicts = self._verdicts(step)
            self.found.windows += [part for part in step.slices if part.sequence_id == OURS]
            self._send(StepDone(self._now, step.step, verdicts, 0.01))
            if paused:
                assert self._step is None, "a paused sequence is in a new step"
                self._send(Resumed(self._now, OURS))
            for proposals in late:
                self._deliver(proposals)
        self.found.branch_hits += self._scheduler.totals.counts.branch_hits
        return tuple(self.text[:length])

    def _passes_in_step(self) -> list[dict[str, tuple[Proposal, ...]]]:
        """Run the passes during a step. Returns the proposals that arrive after it."""
        fault, late = self.fault, []
        in_time = self.timing.during - self.timing.late
        for number in range(self.timing.during + 1):
            if isinstance(fault, DrafterFault) and self._is_due(fault) and number == fault.passes:
                self._change_drafter(fault.way)
            if number == self.timing.during:
                break
            proposals = self._draft()
            if number < in_time:
                self._deliver(proposals)
            else:
                late.append(proposals)
        return late

    def _is_due(self, fault: Fault) -> bool:
        return not isinstance(fault, Preemption) and self._num_steps == fault.step

    def _join_target(self) -> None:
        size, count = 16, 16
        if isinstance(self.fault, Preemption):
            size, count = 1, self.fault.num_blocks
        self._send(TargetJoined(self._now, self.models.vocab_size, 100, size, count))

    def _join_drafter(self, name: str) -> None:
        drafter = self._drafters[name] = Drafter(self.makes[name])
        info = drafter.desk.info
        self._send(
            DrafterJoined(
                self._now,
                name,
                1000,
                kind=info.kind,
                has_model=bool(info.model),
                rules=info.rules,
                wants_top_tokens=info.wants_top_tokens,
            )
        )

    def _change_drafter(self, way: Way) -> None:
        """Make the first drafter stop working for the sequence."""
        name = min(self._drafters)
        if way is Way.DECLINES:
            self._drafters[name].session.close(OURS)
            self._send(DraftDeclined(self._now, name, OURS))
            return
        del self._drafters[name]
        self._send(DrafterLost(self._now, name))
        if way is Way.RESTARTS:
            self._join_drafter(name)

    def _lose_target(self, fault: TargetFault) -> None:
        """Lose the target, so that the step in flight gets no answer."""
        if fault.verified and self._step is not None:
            self._verdicts(self._step)
        self._step = None
        self._send(TargetLost(self._now))
        if fault.drafter_too:
            for name in self.makes:
                self._send(DrafterLost(self._now, name))
                self._join_drafter(name)
        for _ in range(fault.away):
            self._deliver(self._draft())
        self._join_target()

    def _breaks(self, fault: BrokenStream) -> bool:
        """Whether the stream breaks during the step in flight. It may be verified before that."""
        step = self._step
        assert step is not None
        if not (fault.verified or fault.if_refused):
            return True
        refused = [
            verdict.num_accepted == 0
            for verdict in self._verdicts(step)
            if verdict.sequence_id == OURS
        ]
        return all(refused) if fault.if_refused else True

    def _resume(self) -> None:
        """Ask a new driver, whose drafters know nothing, for what follows the text."""
        self._scheduler = Scheduler(prefix_cache=False)
        self._step = None
        self._join_target()
        for name in self.makes:
            self._join_drafter(name)
        resumed = replace(self.request, output_token_ids=tuple(self.text))
        self._send(Admitted(self._now, resumed))

    def _draft(self) -> dict[str, tuple[Proposal, ...]]:
        """Run one pass of each drafter."""
        return {name: drafter.draft() for name, drafter in self._drafters.items()}

    def _deliver(self, proposals: Mapping[str, tuple[Proposal, ...]]) -> bool:
        for name, told in proposals.items():
            if told:
                self._send(Proposed(self._now, name, told))
        return any(proposals.values())

    def _send(self, event: Event) -> None:
        preemptions = self._scheduler.num_preemptions
        for instruction in self._scheduler.handle(event):
            match instruction:
                case RunStep():
                    self._step = instruction
                    self._num_steps += 1
                case Emit(sequence_id, offset, token_ids) if sequence_id == OURS:
                    assert offset == len(self.text)
                    self.text.extend(token_ids)
                case Finish(sequence_id) if sequence_id == OURS:
                    self._finished = True
                case OpenDraft(name, sequence_id, spec, token_ids, stopping, _, vocab_size):
                    declined = self._drafters[name].session.open(
                        sequence_id, spec, token_ids, stopping=stopping, vocab_size=vocab_size
                    )
                    assert declined is None
                case SendOutcome(name, sequence_id, position, token_ids, top_tokens):
                    self._drafters[name].session.outcome(
                        sequence_id, position, token_ids, top_tokens
                    )
                case SendGrant(name, sequence_id, grant):
                    self._drafters[name].session.grant(sequence_id, grant)
                case CloseDraft(name, sequence_id):
                    self._drafters[name].session.close(sequence_id)
                case Emit() | Finish() | WakeAt():
                    pass
                case other:
                    raise AssertionError(other)
        if self.fault is not None:
            self._scheduler.check_integrity()
        if self._scheduler.num_preemptions > preemptions:
            sequence = self._scheduler._state.find(OURS)
            assert sequence is not None
            assert sequence.kv.group is None, "another sequence lost its blocks"
            self.found.preempted_with.append(sequence.tree.num_candidates)

    def _verdicts(self, step: RunStep) -> tuple[SequenceVerdict, ...]:
        return tuple(
            self._verdict(part)
            if part.sequence_id == OURS
            else SequenceVerdict(part.sequence_id, 0, 0)
            for part in step.slices
            if part.verdict
        )

    def _verdict(self, part: Slice) -> SequenceVerdict:
        rule = self.request.spec.rule
        tokens = part.token_ids[len(part.token_ids) - part.window :]
        parents = part.parents or tuple(range(part.window))
        tree = CandidateTree(tokens, parents, part.multiplicities)
        draft_probs = DraftProbs(part.distributions)
        vocab_size = self.models.vocab_size
        check_proposal(rule, tree, draft_probs, vocab_size=vocab_size, max_nodes=100)
        prefix = tuple(self.text)
        coins = WindowCoins(self.named, len(prefix))
        accepted, token_id = verdict_of(self.models, rule, prefix, tree, draft_probs, coins)
        if token_id is None:
            target_V = self.models.target_V((*prefix, *tree.tokens_of(accepted)))
            name = ("plain", len(prefix) + len(accepted))
            token_id = self.named.choice(name, target_V.tolist())
        top_tokens = self._top_tokens(part, tree) if part.top_tokens else ()
        return SequenceVerdict(part.sequence_id, len(accepted), token_id, accepted, top_tokens)

    def _top_tokens(self, part: Slice, tree: CandidateTree) -> tuple[TopTokens, ...]:
        """The target's likeliest tokens after each token of the slice, for drafters that learn from
        them.
        """
        paths = [(*PROMPT, *self.text)[: part.start + 1 + n] for n in range(len(part.token_ids))]
        first = len(part.token_ids) - part.window
        for index, (token_id, parent) in enumerate(
            zip(tree.token_ids, tree.parents, strict=True), start=first
        ):
            paths[index] = (*paths[first - 1 + parent], token_id)
        return tuple(
            TopTokens(
                path[-1],
                tuple(np.argsort(-self.models.target_V(path[len(PROMPT) :]), stable=True).tolist()),
                path[-2] if len(path) > 1 else None,
            )
            for path in paths
        )


def verdict_of(
    models: TinyModels,
    rule: str,
    prefix: Prefix,
    tree: CandidateTree,
    draft_probs: DraftProbs,
    coins: WalkCoins,
) -> tuple[tuple[int, ...], int | None]:
    """The candidates after a prefix that a rule accepts, and the token after a refusal."""

    def begin(node: int, accepted: tuple[int, ...]) -> RuleNode:
        target_V = models.target_V((*prefix, *tree.tokens_of(accepted)))
        return begin_node(rule, target_V, draft_probs, node, len(tree.copies(node)))

    return walk(tree, begin, coins, shuffled=rule == "kseq")


def request(
    rule: str,
    *,
    policy: str,
    branches: int,
    window: int,
    max_tokens: int,
    stopping: Stopping = Stopping.FIXED,
    merge: bool = False,
) -> Request:
    """A request with a prompt of one token."""
    spec = SequenceSpec(SamplingParams(), seed=0, prompt_length=len(PROMPT), rule=rule)
    return Request(
        OURS,
        PROMPT,
        spec,
        max_tokens,
        policy,
        window,
        branches=branches,
        stopping=stopping,
        merge=merge,
    )


def _elder(fault: Preemption) -> Request:
    """An older request whose tokens are all certain."""
    spec = SequenceSpec(SamplingParams(), seed=0, prompt_length=len(PROMPT))
    most = fault.num_blocks - len(PROMPT)
    return Request(ELDER, PROMPT, spec, most, "off", window=0)


def served(
    models: TinyModels,
    request: Request,
    timing: Timing,
    length: int,
    *,
    makes: Mapping[str, MakeProposer],
    fault: Fault | None = None,
) -> Served:
    """Serve one request once for every fall of the coins."""
    found = Served(np.zeros((models.vocab_size,) * length))
    coins = Coins()
    while True:
        coins.restart()
        named = NamedCoins(coins)
        with pytest.MonkeyPatch.context() as patch:
            draw_with(named, patch)
            world = LawWorld(models, request, named, timing, makes, fault, found)
            text = world.serve(length)
        found.law[text] += coins.probability
        if not coins.turn():
            return found

"""The law of what is served, by enumeration: the real scheduler, drafting desk and rules.

Only randomness is replaced. Every number that production takes from (seed, position, purpose,
candidate, prefix) falls on each of its sides in turn, once for each such name: asked for again it
is the same number, so a coin that is used twice shows in the law.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from cluster.decoding.events import (
    Admitted,
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
)
from cluster.decoding.instructions import (
    CloseDraft,
    Emit,
    Finish,
    Grant,
    OpenDraft,
    RunStep,
    SendOutcome,
    Slice,
    WakeAt,
)
from cluster.decoding.policies import PolicyName
from cluster.decoding.scheduler import Scheduler
from paceline.rules import Rule, Stopping
from paceline.sampling import SamplingParams, SequenceSpec
from tests.cluster.decoding.law_coins import NamedCoins, WindowCoins, draw_with
from tests.cluster.decoding.law_drafter import PROMPT, EnumeratedProposer
from tests.workers.verification.enumeration import Coins, Prefix, TinyModels
from workers.drafting.desk import DraftingDesk
from workers.drafting.draw import MODEL_RULES
from workers.drafting.tree import Grant as DraftGrant
from workers.verification.candidates import CandidateTree
from workers.verification.draft_probs import DraftProbs
from workers.verification.rules import check_proposal
from workers.verification.verify import begin_node
from workers.verification.walk import Coins as WalkCoins
from workers.verification.walk import Node, walk

DRAFTER = "d"


@dataclass(frozen=True)
class Timing:
    """When a drafter's passes come: `during` a step, and of these so many `late`, after it."""

    during: int
    late: int = 0


@dataclass(frozen=True)
class Fault:
    """The target is lost while it computes its step number `step`, the prompt's being the first.

    What was drafted in `away` passes arrives before it is back. `drafter_too`: that ends with the
    target, and starts again when the target is back. `paused`: the target is not lost; instead the
    request is paused in the midst of that step, and resumed after it.
    """

    step: int
    away: int = 0
    drafter_too: bool = False
    paused: bool = False


@dataclass
class LawWorld:
    """One request served once, with coins that fall as `named` says."""

    models: TinyModels
    request: Request
    named: NamedCoins
    timing: Timing
    fault: Fault | None = None
    windows: list[Slice] = field(default_factory=list)
    text: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._scheduler = Scheduler(prefix_cache=False)
        self._start_drafter()
        self._step: RunStep | None = None
        self._num_steps = 0
        self._finished = False
        self._now = 0.0

    def serve(self, length: int) -> tuple[int, ...]:
        """The first so many tokens of the text."""
        self._join_target()
        self._send(DrafterJoined(0.0, DRAFTER, 1000, rules=MODEL_RULES))
        self._send(Admitted(0.0, self.request))
        while len(self.text) < length and not self._finished:
            if self._step is None:
                if not self._deliver(self._draft()):
                    self._now += 10.0
                    self._send(Tick(self._now))
                continue
            sent = [self._draft() for _ in range(self.timing.during)]
            in_time = len(sent) - self.timing.late
            for proposals in sent[:in_time]:
                self._deliver(proposals)
            fault = self.fault if self.fault and self._num_steps == self.fault.step else None
            if fault is not None and fault.paused:
                self._send(Paused(self._now, self.request.sequence_id))
            elif fault is not None:
                self._fail(fault)
                continue
            step, self._step = self._step, None
            verdicts = tuple(self._verdict(part) for part in step.slices if part.verdict)
            self._send(StepDone(self._now, step.step, verdicts, 0.01))
            if fault is not None:
                assert self._step is None, "a paused sequence is in a new step"
                self._send(Resumed(self._now, self.request.sequence_id))
            for proposals in sent[in_time:]:
                self._deliver(proposals)
        return tuple(self.text[:length])

    def _join_target(self) -> None:
        self._send(TargetJoined(self._now, self.models.vocab_size, 100, 16, 16))

    def _start_drafter(self) -> None:
        self._desk = DraftingDesk(EnumeratedProposer(self.models), max_sequences=1)
        self._session = self._desk.open_session()

    def _fail(self, fault: Fault) -> None:
        """The step in flight gets no answer."""
        self._step = None
        self._send(TargetLost(self._now))
        if fault.drafter_too:
            self._send(DrafterLost(self._now, DRAFTER))
            self._start_drafter()
            self._send(DrafterJoined(self._now, DRAFTER, 1000, rules=MODEL_RULES))
        for _ in range(fault.away):
            self._deliver(self._draft())
        self._join_target()

    def _draft(self) -> tuple[Proposal, ...]:
        if not self._desk.has_work:
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
            for news in self._desk.run_pass()
            for made in news.proposals
        )

    def _deliver(self, proposals: tuple[Proposal, ...]) -> bool:
        if proposals:
            self._send(Proposed(self._now, DRAFTER, proposals))
        return bool(proposals)

    def _send(self, event: Event) -> None:
        for instruction in self._scheduler.handle(event):
            match instruction:
                case RunStep():
                    self._step = instruction
                    self._num_steps += 1
                case Emit(_, offset, token_ids):
                    assert offset == len(self.text)
                    self.text.extend(token_ids)
                case Finish():
                    self._finished = True
                case OpenDraft(_, sequence_id, spec, token_ids, stopping):
                    assert (
                        self._session.open(sequence_id, spec, token_ids, stopping=stopping) is None
                    )
                case SendOutcome(_, sequence_id, position, token_ids):
                    self._session.outcome(sequence_id, position, token_ids)
                case Grant(_, sequence_id, until, branches, nodes):
                    self._session.grant(sequence_id, DraftGrant(until, branches, nodes))
                case CloseDraft(_, sequence_id):
                    self._session.close(sequence_id)
                case WakeAt():
                    pass
                case other:
                    raise AssertionError(other)

    def _verdict(self, part: Slice) -> SequenceVerdict:
        self.windows.append(part)
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
        return SequenceVerdict(part.sequence_id, len(accepted), token_id, accepted)


def verdict_of(
    models: TinyModels,
    rule: Rule,
    prefix: Prefix,
    tree: CandidateTree,
    draft_probs: DraftProbs,
    coins: WalkCoins,
) -> tuple[tuple[int, ...], int | None]:
    """What a rule accepts of candidates after a prefix, and the token after a refusal."""

    def begin(node: int, accepted: tuple[int, ...]) -> Node:
        target_V = models.target_V((*prefix, *tree.tokens_of(accepted)))
        return begin_node(rule, target_V, draft_probs, node, len(tree.copies(node)))

    return walk(tree, begin, coins, shuffled=rule is Rule.KSEQ)


def request(
    rule: Rule,
    *,
    policy: PolicyName,
    branches: int,
    window: int,
    max_tokens: int,
    stopping: Stopping = Stopping.FIXED,
) -> Request:
    """A request of a token's prompt."""
    spec = SequenceSpec(SamplingParams(), seed=0, prompt_length=len(PROMPT), rule=rule)
    return Request(
        1, PROMPT, spec, max_tokens, policy, window, branches=branches, stopping=stopping
    )


@dataclass
class Served:
    """The law [V] * length of the first tokens, over all coins, and the windows on the way."""

    law: NDArray[np.float64]
    windows: list[Slice] = field(default_factory=list)


def served(
    models: TinyModels,
    request: Request,
    timing: Timing,
    length: int,
    *,
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
            text = LawWorld(models, request, named, timing, fault, found.windows).serve(length)
        found.law[text] += coins.probability
        if not coins.turn():
            return found

"""The law of what is served, by enumeration: the real scheduler, drafting desk and rules.

Only randomness is replaced. Every number that production takes from (seed, position, purpose,
candidate, prefix) falls on each of its sides in turn, once for each such name: asked for again it
is the same number, so a coin that is used twice shows in the law.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from cluster.decoding.events import (
    Admitted,
    DrafterJoined,
    Event,
    Proposal,
    Proposed,
    Request,
    SequenceVerdict,
    StepDone,
    TargetJoined,
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
from tests.workers.verification.enumeration import Coins, Prefix, TinyModels
from workers.drafting import draw
from workers.drafting.chances import RankChances, drawn_prior
from workers.drafting.desk import DraftingDesk
from workers.drafting.draw import MODEL_RULES
from workers.drafting.growth import Growth
from workers.drafting.nodes import Kept, NewNodes
from workers.drafting.proposer import Draft, DrafterInfo, Pass, TopTokens
from workers.drafting.stopper import Stopper
from workers.drafting.stopping import DrafterStopping
from workers.drafting.tree import DraftTree
from workers.drafting.tree import Grant as DraftGrant
from workers.verification.candidates import CandidateTree
from workers.verification.draft_probs import DraftProbs, SparseProbs
from workers.verification.rules import check_proposal
from workers.verification.verify import begin_node
from workers.verification.walk import Coins as WalkCoins
from workers.verification.walk import Node, walk

PROMPT = (0,)
DRAFTER = "d"


class BegunModels(TinyModels):
    """Target and drafter are sure of the first token: a prompt's step needs not be summed over."""

    def target_V(self, prefix: Prefix) -> NDArray[np.float64]:
        return super().target_V(prefix) if prefix else np.eye(self.vocab_size)[0]

    def draft(self, prefix: Prefix) -> SparseProbs:
        sure = SparseProbs(np.array([0]), np.ones(1, dtype=np.float32))
        return super().draft(prefix) if prefix else sure


@dataclass
class NamedCoins:
    """Coins by name. A name's uniform that was tested before lies where the tests left it."""

    coins: Coins
    _fixed: dict[tuple[object, ...], object] = field(default_factory=dict)
    _spans: dict[tuple[object, ...], tuple[float, float]] = field(default_factory=dict)

    def choice(self, name: tuple[object, ...], probs: Sequence[float]) -> int:
        """A side with these probabilities; by the same name always of the same ones."""
        told = tuple(probs)
        known = self._fixed.get(name)
        if known is None:
            known = self._fixed[name] = (self.coins.toss(probs), told)
        assert isinstance(known, tuple)
        side, before = known
        assert before == told, f"the noise {name} is used for two distributions"
        assert isinstance(side, int)
        return side

    def below(self, name: tuple[object, ...], probability: float) -> bool:
        """Whether a uniform is below this."""
        low, high = self._spans.get(name, (0.0, 1.0))
        cut = min(max(probability, low), high)
        share = (cut - low) / (high - low)
        is_below = self.coins.toss([share, 1 - share]) == 0
        self._spans[name] = (low, cut) if is_below else (cut, high)
        return is_below


@dataclass
class _WindowCoins:
    """The coins of one window, named by position as KeyedCoins are."""

    named: NamedCoins
    first_position: int

    def order(self, depth: int, num_tests: int) -> Sequence[int]:
        orders = list(itertools.permutations(range(num_tests)))
        name = ("order", self.first_position + depth)
        return orders[self.named.choice(name, [1 / len(orders)] * len(orders))]

    def accepts(self, depth: int, number: int, probability: float) -> bool:
        return self.named.below(("test", self.first_position + depth, number), probability)

    def token(self, depth: int, residual_V: NDArray[np.float64]) -> int:
        probs = (residual_V / residual_V.sum()).tolist()
        return self.named.choice(("residual", self.first_position + depth), probs)


class EnumeratedProposer:
    """Drafts as a model drafter does, from the distributions of TinyModels."""

    def __init__(self, models: TinyModels) -> None:
        self._models = models
        self._grown: dict[DraftTree, Growth] = {}
        self._chances = RankChances(drawn_prior)

    @property
    def info(self) -> DrafterInfo:
        return DrafterInfo("model", "tiny", self._models.vocab_size, b"", 1000, MODEL_RULES)

    def open(self, tree: DraftTree) -> None:
        self._grown[tree] = Growth(tree, self._chances, Stopper(tree.stopping, DrafterStopping()))

    def close(self, tree: DraftTree) -> None:
        del self._grown[tree]

    def committed(self, tree: DraftTree, kept: Kept, top_tokens: Sequence[TopTokens]) -> None:
        self._grown[tree].committed(kept)

    def known(self, tree: DraftTree) -> NewNodes:
        return self._grown[tree].known()

    def run_pass(self, trees: Sequence[DraftTree], *, pass_ms: float) -> Pass:
        result = Pass(took_part=list(trees), tokens_fed=1)
        for tree in trees:
            growth = self._grown[tree]
            fed = growth.to_feed(pass_ms=pass_ms)
            for node in fed:
                growth.expand(node, self._logits_V(tree.prefix(node)))
            new = growth.harvest(fed, pass_ms=pass_ms)
            over = not fed and not new.token_ids
            if new.token_ids or over:
                last = growth.stopped and (over or growth.as_chain)
                result.drafts.append(Draft(tree, new, last=last, grant_used=over))
        return result

    def check_integrity(self, trees: Sequence[DraftTree]) -> None:
        assert set(self._grown) == set(trees)

    def _logits_V(self, prefix: Sequence[int]) -> torch.Tensor:
        sparse = self._models.draft(tuple(prefix[len(PROMPT) :]))
        logits_V = torch.full((self._models.vocab_size,), -torch.inf)
        logits_V[torch.from_numpy(sparse.token_ids_M)] = torch.from_numpy(sparse.probs_M).log()
        return logits_V


@dataclass(frozen=True)
class Timing:
    """When a drafter's passes come: `during` a step, and of these so many `late`, after it."""

    during: int
    late: int = 0


@dataclass
class LawWorld:
    """One request served once, with coins that fall as `named` says."""

    models: TinyModels
    request: Request
    named: NamedCoins
    timing: Timing
    windows: list[Slice] = field(default_factory=list)
    text: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._scheduler = Scheduler(prefix_cache=False)
        self._desk = DraftingDesk(EnumeratedProposer(self.models), max_sequences=1)
        self._session = self._desk.open_session()
        self._step: RunStep | None = None
        self._finished = False
        self._now = 0.0

    def serve(self, length: int) -> tuple[int, ...]:
        """The first so many tokens of the text."""
        self._send(TargetJoined(0.0, self.models.vocab_size, 100, 16, 16))
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
            step, self._step = self._step, None
            verdicts = tuple(self._verdict(part) for part in step.slices if part.verdict)
            self._send(StepDone(self._now, step.step, verdicts, 0.01))
            for proposals in sent[in_time:]:
                self._deliver(proposals)
        return tuple(self.text[:length])

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
        coins = _WindowCoins(self.named, len(prefix))
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


def served(models: TinyModels, request: Request, timing: Timing, length: int) -> Served:
    """Serve one request once for every fall of the coins."""
    found = Served(np.zeros((models.vocab_size,) * length))
    coins = Coins()
    while True:
        coins.restart()
        named = NamedCoins(coins)
        with pytest.MonkeyPatch.context() as patch:
            _draw_with(named, patch)
            text = LawWorld(models, request, named, timing, found.windows).serve(length)
        found.law[text] += coins.probability
        if not coins.turn():
            return found


def _draw_with(named: NamedCoins, patch: pytest.MonkeyPatch) -> None:
    """Let the drafter's draws fall as the coins say, each named as its noise is."""

    def independent(
        kept: SparseProbs, spec: SequenceSpec, position: int, numbers: Sequence[int]
    ) -> tuple[int, ...]:
        exact = kept.exact()
        probs, ids = exact.probs_M.tolist(), exact.token_ids_M.tolist()
        return tuple(
            ids[named.choice(("draft", spec.seed, position, number), probs)] for number in numbers
        )

    def chain_token(kept: SparseProbs, spec: SequenceSpec, position: int) -> int:
        return independent(kept, spec, position, (0,))[0]

    def without_replacement(
        kept: SparseProbs, spec: SequenceSpec, position: int, num_children: int
    ) -> tuple[int, ...]:
        left = kept.exact()
        drawn: list[int] = []
        for number in range(min(num_children, left.token_ids_M.size)):
            name = ("draft", spec.seed, position, "after", number)
            drawn.append(int(left.token_ids_M[named.choice(name, left.probs_M.tolist())]))
            left = left.without(drawn[-1])
        return tuple(drawn)

    patch.setattr(draw, "draw_independent", independent)
    patch.setattr(draw, "draw_chain_token", chain_token)
    patch.setattr(draw, "draw_without_replacement", without_replacement)

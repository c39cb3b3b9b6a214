"""The cells of `bench lookahead`: which policies, links and acceptances, and what they decode.

Luck must not change the results: over 800 tokens, luck alone changes the speed by 4 to 5 %. So, of
many seeds for a drafter's guesses, the bench takes the seed whose acceptance over exactly these
texts is nearest to that of an endless text.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from cluster.decoding.policies.chain import CHAIN
from cluster.decoding.policies.fanout import FANOUT
from cluster.decoding.policies.off import OFF
from cluster.decoding.policy import POLICIES, LookaheadPolicy, policy_named
from cluster.simulation.closed_forms import best_lockstep_window, expected_tokens
from paceline.sampling import SequenceSpec
from workers.emulated.profiles import DeviceProfile
from workers.emulated.replay_text import (
    Guess,
    PrefixReader,
    ReplayText,
    spec_of,
)
from workers.models.stand_in import NUM_RESERVED, VOCAB_SIZE

Load = Literal["set", "parallel"]
"""The drafter: one that drafts token by token, or a parallel one."""
PARALLEL: Load = "parallel"

RTTS_MS = (0.1, 2.0, 10.0)
ACCEPTANCES = (0.75, 0.85)
HIT_RATES = (0.85, 0.5, 0.0)
BATCHES = (8, 64)
"""Batches besides 1. They are measured without a link, at the higher acceptance."""
CHAIN_WINDOW = 8
FANOUT_WINDOW = 12
"""Window of policies with branches, for one sequence with a set acceptance."""
TREE_WINDOW, TREE_BRANCHES, TREE_BATCH = 32, 4, 8
"""Shape of the cell with trees that measures the time between steps."""
FANOUT_TREE_WINDOW, FANOUT_TREE_BRANCHES = 32, 2
"""Shape of the cells of fanout and spread that also verify the branches that they send ahead."""
AUTO_WINDOW = 32
"""Upper bound on the windows of `auto` on the emulated pair."""
HITS_BRANCHES = ("fanout", "spread", "replicas", "auto")
"""Policies that use the drafter's second guess."""
NUM_SPREAD = 2
"""Drafters of the cells of spread that verify chains."""
NUM_SPREAD_TREE = 4 if len(os.sched_getaffinity(0)) >= 4 else 2
"""Drafters of the cells of spread that verify trees. Four drafters and the driver need 1.6 cores
together; on two cores they wait for each other.
"""
NUM_REPLICAS = 2
"""Target groups of the cells of replicas. Each needs GPUs of its own."""

PROMPT_LENGTH = 16
TEMPERATURES = (0.0, 1.0)
SEEDS_TRIED = 400
WARM_UP_TOKENS, MOST_WARM_UPS = 12, 8
PACE = 7
"""Draft passes during a step of the emulated pair."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy under one condition. `num_drafters`: drafters of the layout.

    `acceptance`, `hit_rate`: the rates that are set. None: not used.
    """

    policy: str
    load: Load
    rtt_ms: float
    acceptance: float | None
    hit_rate: float | None
    batch: int
    window: int
    branches: int = 1
    num_drafters: int = 1

    @property
    def num_targets(self) -> int:
        """Target groups that the policy uses."""
        return policy_named(self.policy).needs.groups

    @property
    def drafts(self) -> bool:
        """Whether it is anything but plain decoding."""
        return policy_named(self.policy).drafts

    @property
    def name(self) -> str:
        """A name for people, unique among the cells."""
        batch = "" if self.batch == 1 else f", batch {self.batch}"
        load = "" if self.load == "set" else f", {self.load}"
        if not self.drafts:
            return f"off{load}{batch}"
        if self.acceptance is not None:
            load += f", acceptance {self.acceptance:g}"
        hits = "" if self.hit_rate is None else f", hits {self.hit_rate:g}"
        tree = f", trees of {self.window}" if self.branches > 1 else ""
        tree += f", {self.num_drafters} drafters" if self.num_drafters > 1 else ""
        return f"{self.policy}, rtt {self.rtt_ms:g} ms{load}{hits}{tree}{batch}"


def part_names() -> tuple[str, ...]:
    """Parts that can be measured alone: a policy, or all with a parallel drafter."""
    return (*(policy.name for policy in _policies()), PARALLEL)


def cells(
    target: DeviceProfile, drafter: DeviceProfile, *, quick: bool, parts: Sequence[str] = ()
) -> list[Cell]:
    """All cells except plain decoding. `quick`: one per policy. `parts`: only these."""
    found = []
    for policy in _policies():
        if not parts or policy.name in parts:
            for condition in _conditions(quick=quick):
                found += _cells_of(policy, condition, target, drafter, quick=quick)
            if not quick:
                found += _trees_of(policy)
    if PARALLEL in parts or not (parts or quick):
        found += _parallel()
    return found


def _parallel() -> Iterator[Cell]:
    """The cells with a parallel drafter, at the higher acceptance."""
    shapes = {
        "chain": (2 * CHAIN_WINDOW,),
        "fanout": (FANOUT_TREE_WINDOW, FANOUT_TREE_BRANCHES),
        "auto": (AUTO_WINDOW,),
    }
    for name, shape in shapes.items():
        policy = policy_named(name)
        hits = HIT_RATES[0] if policy.fans_out else None
        for rtt_ms in RTTS_MS:
            yield Cell(policy.name, PARALLEL, rtt_ms, ACCEPTANCES[1], hits, 1, *shape)


def plain_cell(batch: int, load: Load) -> Cell:
    """Plain decoding of `batch` sequences."""
    return Cell(OFF.name, load, RTTS_MS[0], None, None, batch, 0)


@dataclass(frozen=True, slots=True)
class _Condition:
    rtt_ms: float
    acceptance: float
    batch: int


def _policies() -> list[LookaheadPolicy]:
    return [policy for policy in POLICIES.all().values() if policy.drafts]


def _conditions(*, quick: bool) -> Iterator[_Condition]:
    if quick:
        yield _Condition(RTTS_MS[0], ACCEPTANCES[1], 1)
        return
    for rtt_ms in RTTS_MS:
        for acceptance in ACCEPTANCES:
            yield _Condition(rtt_ms, acceptance, 1)
    for batch in BATCHES:
        yield _Condition(RTTS_MS[0], ACCEPTANCES[1], batch)


def _cells_of(
    policy: LookaheadPolicy,
    condition: _Condition,
    target: DeviceProfile,
    drafter: DeviceProfile,
    *,
    quick: bool,
) -> list[Cell]:
    acceptance, batch, rtt_ms = condition.acceptance, condition.batch, condition.rtt_ms
    hit_rates: Sequence[float | None] = (None,)
    if policy.fans_out:
        every = policy is FANOUT and not quick and batch == 1
        hit_rates = HIT_RATES if every else HIT_RATES[:1]
    window = CHAIN_WINDOW
    if policy.fans_out and batch == 1:
        window = FANOUT_WINDOW
    if not policy.drafting_is_free:
        window = best_lockstep_window(
            acceptance,
            step_ms=target.pass_ms.ms(batch, batch),
            draft_ms=drafter.pass_ms.ms(batch, batch),
            rtt_ms=rtt_ms,
        )
    if policy.adapts:
        window = AUTO_WINDOW
    drafters = max(1, policy.needs.drafters)
    return [
        Cell(policy.name, "set", rtt_ms, acceptance, hit_rate, batch, window, num_drafters=drafters)
        for hit_rate in hit_rates
    ]


def _trees_of(policy: LookaheadPolicy) -> Iterator[Cell]:
    """The cells whose steps verify trees."""
    if policy is CHAIN:
        acceptance, hit_rate = ACCEPTANCES[1], HIT_RATES[0]
        tree = (TREE_BATCH, TREE_WINDOW, TREE_BRANCHES)
        yield Cell(policy.name, "set", RTTS_MS[0], acceptance, hit_rate, *tree)
    if policy.fans_out and not (policy.adapts or policy.needs.chains_only):
        drafters = NUM_SPREAD_TREE if policy.spreads else 1
        shape = (1, FANOUT_TREE_WINDOW, FANOUT_TREE_BRANCHES, drafters)
        for rtt_ms in RTTS_MS:
            for acceptance in ACCEPTANCES:
                yield Cell(policy.name, "set", rtt_ms, acceptance, HIT_RATES[0], *shape)


# What they decode


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request of a cell."""

    prompt: tuple[int, ...]
    temperature: float
    seed: int
    max_tokens: int

    def spec(self) -> SequenceSpec:
        """What a worker must know of the sequence."""
        return spec_of(len(self.prompt), self.temperature, self.seed)


def set_load(batch: int, max_tokens: int) -> list[LoadRequest]:
    """`batch` requests at each temperature, of `max_tokens` tokens."""
    return [
        LoadRequest(_prompt(number, temperature), temperature, 1000 + number, max_tokens)
        for temperature in TEMPERATURES
        for number in range(batch)
    ]


def rounds_of(load: Sequence[LoadRequest], batch: int) -> list[Sequence[LoadRequest]]:
    """The requests that are decoded together, `batch` at a time."""
    return [load[start : start + batch] for start in range(0, len(load), batch)]


def warm_up_of(load: Sequence[LoadRequest], batch: int) -> list[LoadRequest]:
    """A few tokens of the first requests, decoded before anything counts."""
    first = load[: min(batch, MOST_WARM_UPS)]
    return [replace(one, max_tokens=min(WARM_UP_TOKENS, one.max_tokens)) for one in first]


def pinned_guess(acceptance: float, hit_rate: float, load: Sequence[LoadRequest]) -> Guess:
    """A seed with which the drafter guesses this load about as well as an endless one.

    Over the texts it compares with their expectations: the share of right guesses, and the tokens
    per step of lockstep, pearl and fanout. `hit_rate` is that of fanout.
    """
    text = ReplayText(VOCAB_SIZE)
    digests = [_path(text, request) for request in load]
    expected = [
        expected_tokens(acceptance, PACE - 1),
        expected_walk(acceptance, 0.0),
        expected_walk(acceptance, hit_rate),
    ]

    def unlike(seed: int) -> float:
        guess = Guess(acceptance, hit_rate, seed)
        ranks: list[int] = []
        for path, request in zip(digests, load, strict=True):
            ranks += _ranks(text, path, request, guess)
        share = ranks.count(0) / len(ranks)
        found = [_lockstep_walk(ranks), walk(ranks, {0}), walk(ranks, {0, 1})]
        return abs(share / acceptance - 1) + sum(
            abs(one / wanted - 1) for one, wanted in zip(found, expected, strict=True)
        )

    return Guess(acceptance, hit_rate, min(range(SEEDS_TRIED), key=unlike))


def _ranks(
    text: ReplayText, path: Sequence[int], request: LoadRequest, guess: Guess
) -> Iterator[int]:
    """The rank of each true token among the drafter's two best guesses; 2: it is neither."""
    spec = request.spec()
    for digest in path:
        truth, guesses = text.next_token(digest, spec), text.guesses(digest, spec, guess, 2)
        yield guesses.index(truth) if truth in guesses else 2


def _lockstep_walk(ranks: Sequence[int]) -> float:
    """Tokens per step if each step verifies a window of PACE - 1 and adds a token."""
    place = steps = 0
    while place < len(ranks):
        place += _run(ranks, place) + 1
        steps += 1
    return place / steps


def walk(ranks: Sequence[int], foreseen: Collection[int]) -> float:
    """Tokens per step if the drafter drafts the next window while a step runs.

    `foreseen`: the ranks of guesses that the drafter has drafted for. A step whose last token has
    such a rank leaves a window for the next step. Otherwise the next step has no window.
    """
    place = steps = 0
    has_window = False
    while place < len(ranks):
        place += _run(ranks, place) if has_window else 0
        has_window = place < len(ranks) and ranks[place] in foreseen
        place += 1
        steps += 1
    return place / steps


def _run(ranks: Sequence[int], place: int) -> int:
    """The number of right guesses from `place` on, at most a window."""
    run = 0
    while run < PACE - 1 and place + run < len(ranks) and ranks[place + run] == 0:
        run += 1
    return run


def expected_walk(acceptance: float, hit_rate: float) -> float:
    """The expectation of `walk` over an endless text."""
    whole = acceptance**PACE
    foreseen = acceptance + (1 - acceptance) * hit_rate
    stays = whole + (1 - whole) * hit_rate
    with_window = foreseen / (1 - stays + foreseen)
    return 1 - with_window + with_window * expected_tokens(acceptance, PACE - 1)


def _prompt(number: int, temperature: float) -> tuple[int, ...]:
    first = 64 + number * PROMPT_LENGTH + int(temperature) * 1600
    return tuple(
        NUM_RESERVED + (first + place) % (VOCAB_SIZE - NUM_RESERVED)
        for place in range(PROMPT_LENGTH)
    )


def _path(text: ReplayText, request: LoadRequest) -> list[int]:
    """The digest of each prefix that a request continues."""
    spec, reader = request.spec(), PrefixReader().read(request.prompt, 0)
    found = []
    for index in range(request.max_tokens):
        found.append(reader.digest())
        reader.read((text.next_token(found[-1], spec),), len(request.prompt) + index)
    return found

"""All drivers of a layout under one clock, and the router that gives them a load's requests."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from cluster.decoding.events import Request, TargetJoined
from cluster.decoding.instructions import Emit, Finish
from cluster.decoding.policy import policy_named
from cluster.decoding.scheduler import Scheduler
from cluster.simulation.clock import VirtualClock
from cluster.simulation.drafter import SimulatedDrafter
from cluster.simulation.driver import Listener, SimulatedDriver
from cluster.simulation.layout import Layout, Load
from cluster.simulation.target import BLOCK_SIZE, SimulatedTarget
from paceline.sampling import SamplingParams, SequenceSpec
from workers.emulated.replay_text import PrefixReader, ReplayText
from workers.models.stand_in import NUM_RESERVED

VOCAB_SIZE = 4096
MAX_MODEL_LEN = 32768


@dataclass(slots=True)
class Answered:
    """One request and its answer. Times are seconds of the virtual clock."""

    request: Request
    group: int
    arrived: float
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """Times at which tokens came, and how many came then."""
    steps: int = 0

    @property
    def first_at(self) -> float:
        return self.arrivals[0][0]

    @property
    def last_at(self) -> float:
        return self.arrivals[-1][0]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Totals over all groups at a moment: seconds, tokens and requests."""

    time: float = 0.0
    committed: int = 0
    asked: int = 0
    answered: int = 0
    target_busy: float = 0.0
    target_prefill: float = 0.0
    target_waiting: float = 0.0
    drafter_busy: float = 0.0
    drafted: int = 0
    used: int = 0


class Fleet(Listener):
    """Simulates a load on a layout. Call `run` once."""

    def __init__(
        self,
        layout: Layout,
        load: Load,
        *,
        rounds: Sequence[Sequence[Request]] | None = None,
    ) -> None:
        """`rounds`: requests to use instead of made-up ones, as many as the load has.

        The requests of a round are asked together once all earlier ones are answered.
        """
        self.clock = VirtualClock()
        self.text = ReplayText(VOCAB_SIZE)
        self.drivers: list[SimulatedDriver] = []
        self.targets: list[SimulatedTarget] = []
        self.drafters: list[SimulatedDrafter] = []
        self.answered: list[Answered] = []
        self.committed = 0
        """Committed tokens of all requests."""
        self._load = load
        self._open: dict[int, Answered] = {}
        self._rounds = iter([len(one) for one in rounds]) if rounds else None
        self._coming = chain.from_iterable(rounds) if rounds else requests_of(load, layout)
        self._num_asked = 0
        # Do not measure the first answers, since the fleet is empty at first. None: too few answers
        # would be left.
        first = load.requests // 5 if load.concurrency is None else load.concurrency
        self._warm_after = first if 3 * first <= load.requests else None
        self._swing: list[Snapshot] = []
        for part in (layout, *layout.beside):
            for _ in range(part.cells):
                self._build_cell(part)
        self._outstanding = [0] * len(self.drivers)

    def run(self) -> None:
        load = self._load
        if self._rounds is not None:
            self._ask_for_a_round(self._rounds)
        elif load.concurrency is not None:
            for number in range(min(load.concurrency, load.requests)):
                self._ask((number + 1) / load.concurrency if load.out_of_step else 1.0)
        else:
            for time in arrival_times(load):
                self.clock.at(time, self._ask)
        self.clock.run()

    @property
    def in_full_swing(self) -> tuple[Snapshot, Snapshot]:
        """Two moments after the first answers, between which there were always more requests."""
        if len(self._swing) == 2 and self._swing[0].time < self._swing[1].time:
            return self._swing[0], self._swing[1]
        last = max(one.last_at for one in self.answered)
        return Snapshot(), replace(self._snapshot(), time=last)

    @property
    def same_text(self) -> bool:
        """Whether every answer is complete and equals the text of plain decoding."""
        return all(
            len(one.token_ids) == one.request.max_tokens
            and is_true_text(self.text, one.request, one.token_ids)
            for one in self.answered
        )

    def check_end(self) -> None:
        assert len(self.answered) == self._load.requests, "a request was lost"
        assert not self._open
        for driver in self.drivers:
            driver.scheduler.check_integrity()
            assert driver.scheduler.num_running == driver.scheduler.num_waiting == 0
        assert all(drafter.num_open == 0 for drafter in self.drafters), "a sequence stayed open"

    def emitted(self, emit: Emit) -> None:
        one = self._open[emit.sequence_id]
        assert emit.offset == len(one.token_ids), "tokens were left out or said twice"
        one.token_ids += emit.token_ids
        one.arrivals.append((self.clock.now, len(emit.token_ids)))
        self.committed += len(emit.token_ids)

    def finished(self, finish: Finish) -> None:
        """A caller has its answer. With a fixed number of callers it asks again."""
        one = self._open.pop(finish.sequence_id)
        one.steps = finish.stats.steps
        self.answered.append(one)
        self._outstanding[one.group] -= 1
        if len(self.answered) == self._warm_after:
            self._swing.append(self._snapshot())
        if self._rounds is not None:
            if not self._open:
                self._ask_for_a_round(self._rounds)
        elif self._load.concurrency is not None:
            self._ask()

    def _ask_for_a_round(self, rounds: Iterator[int]) -> None:
        for _ in range(next(rounds, 0)):
            self._ask()

    def _ask(self, share: float = 1.0) -> None:
        """Give the next request, if any, to the driver with the fewest.

        `share`: the share of its tokens to generate, at least 2 tokens.
        """
        request = next(self._coming, None)
        if request is None:
            return
        if share < 1:
            request = replace(request, max_tokens=max(2, round(share * request.max_tokens)))
        self._num_asked += 1
        if self._num_asked == self._load.requests and self._swing:
            self._swing.append(self._snapshot())
        outstanding = self._outstanding
        group = outstanding.index(min(outstanding))
        outstanding[group] += 1
        self._open[request.sequence_id] = Answered(request, group, self.clock.now)
        self.drivers[group].admit(request)

    def _snapshot(self) -> Snapshot:
        targets = [target.meter for target in self.targets]
        drafters = [drafter.meter for drafter in self.drafters]
        return Snapshot(
            time=self.clock.now,
            committed=self.committed,
            asked=self._num_asked,
            answered=len(self.answered),
            target_busy=sum(meter.busy_seconds for meter in targets),
            target_prefill=sum(meter.prefill_seconds for meter in targets),
            target_waiting=sum(meter.waiting_seconds for meter in targets),
            drafter_busy=sum(meter.busy_seconds for meter in drafters),
            drafted=sum(meter.drafted for meter in drafters),
            used=sum(driver.scheduler.totals.counts.used for driver in self.drivers),
        )

    def _build_cell(self, layout: Layout) -> None:
        costs, shares = layout.costs, layout.shared_host is not None
        every_target = [
            [
                SimulatedTarget(
                    self.clock, layout.target, self.text, beside=layout.shared_host or 1
                )
                for _ in range(layout.replicas)
            ]
            for _ in range(layout.targets)
        ]

        def watch(begins: bool) -> None:
            for target in chain.from_iterable(every_target):
                target.drafting(begins)

        drafters = []
        if layout.drafter is not None:
            for _ in range(layout.drafters):
                drafter = SimulatedDrafter(
                    self.clock,
                    layout.drafter,
                    self.text,
                    self._load.guess,
                    max_position=MAX_MODEL_LEN,
                    costs=costs,
                    watch=watch if shares else None,
                )
                drafters.append(drafter)
        for targets in every_target:
            scheduler = Scheduler(
                max_num_seqs=layout.max_num_seqs,
                max_step_tokens=layout.max_step_tokens,
                wait_seconds=layout.wait_ms / 1000,
                prefix_cache=layout.prefix_cache,
                num_groups=layout.replicas,
                serves_auto=policy_named(layout.policy).adapts,
            )
            driver = SimulatedDriver(self.clock, scheduler, targets, self, costs=costs)
            for group in range(layout.replicas):
                driver.join_target(
                    TargetJoined(
                        0.0,
                        self.text.vocab_size,
                        MAX_MODEL_LEN,
                        BLOCK_SIZE,
                        layout.kv_blocks,
                        group=group,
                    )
                )
            for number, drafter in enumerate(drafters):
                driver.join_drafter(f"drafter-{number}", drafter, layout.link, shares_host=shares)
            self.targets += targets
            self.drivers.append(driver)
        self.drafters += drafters


def requests_of(load: Load, layout: Layout) -> Iterator[Request]:
    """The requests in order. No two prompts share a prefix."""
    sampling = SamplingParams(temperature=load.temperature)
    for number in range(load.first_request, load.first_request + load.requests):
        yield Request(
            sequence_id=number,
            prompt_token_ids=_prompt(number, load.prompt_tokens),
            spec=SequenceSpec(sampling, seed=number, prompt_length=load.prompt_tokens),
            max_tokens=load.output_tokens,
            policy=layout.policy,
            window=layout.window,
            branches=layout.branches,
        )


def _prompt(number: int, length: int) -> tuple[int, ...]:
    """The request's number in base `VOCAB_SIZE - NUM_RESERVED`, then one token repeated."""
    base = VOCAB_SIZE - NUM_RESERVED
    first = (number % base, number // base % base, number // base**2)
    return tuple(NUM_RESERVED + digit for digit in (*first, *[0] * length)[:length])


def arrival_times(load: Load) -> Iterator[float]:
    """Arrival times in seconds of requests that come at random: a Poisson process."""
    assert load.per_second is not None
    luck = random.Random(f"{load.guess.seed} {load.first_request}")
    time = 0.0
    for _ in range(load.requests):
        yield time
        time += luck.expovariate(load.per_second)


def is_true_text(text: ReplayText, request: Request, token_ids: list[int]) -> bool:
    """Whether an answer is the text of plain decoding."""
    reader = PrefixReader().read(request.prompt_token_ids, 0)
    for position, token_id in enumerate(token_ids, start=len(request.prompt_token_ids)):
        if text.next_token(reader.digest(), request.spec) != token_id:
            return False
        reader.read_one(token_id, position)
    return True

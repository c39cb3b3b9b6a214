"""Drafters in the driver's process: what a step has of them, and what their failures cost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.decoding.events import Admitted, DrafterJoined, Tick
from cluster.decoding.policy import POLICIES
from cluster.decoding.scheduler import Scheduler
from cluster.driver.at_hand import MOST_FAILURES, OwnDrafters
from tests.cluster.decoding.test_scheduler_fuzz import Fuzz
from tests.cluster.decoding.true_text import END_TOKEN, request, true_token
from tests.cluster.decoding.world import World
from workers.drafting.kind import (
    DRAFTERS,
    CandidateKind,
    Draft,
    DrafterInfo,
    DrafterKind,
    DrafterOptions,
    DraftTree,
    Kept,
    NewNodes,
    Pass,
    TakesNoTime,
    TopTokens,
)
from workers.drafting.tree import PIECE


class Seer(TakesNoTime):
    """Drafts the true text; every `wrong_every`-th token is wrong.

    Raises in the next `failures` passes, and once at an `open` if `refuses`.
    """

    wrong_every = 5
    failures = 0
    refuses = False

    @property
    def info(self) -> DrafterInfo:
        return DrafterInfo("seer", frozenset({"coupled"}))

    def open(self, tree: DraftTree) -> None:
        if Seer.refuses:
            Seer.refuses = False
            raise RuntimeError("not this one")

    def close(self, tree: DraftTree) -> None:
        pass

    def committed(self, tree: DraftTree, kept: Kept, top_tokens: Sequence[TopTokens]) -> None:
        pass

    def run_pass(self, trees: Sequence[DraftTree], *, pass_ms: float) -> Pass:
        if Seer.failures:
            Seer.failures -= 1
            raise RuntimeError("as it was told to")
        result = Pass(took_part=list(trees))
        for tree in trees:
            path = list(tree.prefix(tree.end))
            new: list[int] = []
            while len(new) < tree.chain_room and END_TOKEN not in new:
                right = true_token(path, tree.spec.seed)
                new.append(1 if len(path) % Seer.wrong_every == 0 else right)
                path.append(new[-1])
            result.drafts.append(Draft(tree, NewNodes(new), grant_used=True))
        return result

    def check_integrity(self, trees: Sequence[DraftTree]) -> None:
        pass


async def load_seer(options: DrafterOptions) -> Seer:
    return Seer()


@pytest.fixture(autouse=True)
def seer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the kind for a test."""
    monkeypatch.setattr(Seer, "wrong_every", 5)
    monkeypatch.setattr(Seer, "failures", 0)
    monkeypatch.setattr(Seer, "refuses", False)
    DRAFTERS.all()
    kind = DrafterKind(
        name="seer", help="for tests", load=load_seer, candidates=CandidateKind.DETERMINISTIC
    )
    monkeypatch.setitem(DRAFTERS._entries, "seer", kind)


class Drafted:
    """A world with drafters of these kinds at hand."""

    def __init__(self, *kinds: str) -> None:
        options = {f"own-{number}": DrafterOptions(kind) for number, kind in enumerate(kinds)}
        self.own = OwnDrafters(options)
        self.world = World(Scheduler(at_hand=self.own))
        self.passes = 0
        self.world.join_target()

    async def start(self) -> World:
        await self.own.start(self)
        return self.world

    def drafter_joined(self, joined: DrafterJoined) -> None:
        assert (joined.has_model, joined.shares_host) == (False, True)
        self.world.send(replace(joined, now=self.world.now))

    def proposed_at_hand(self, name: str, proposals: Sequence[object], seconds: float) -> None:
        self.passes += 1


def run_out(world: World) -> list[int]:
    """Answer steps until all requests have ended. Returns the windows of steps that decoded."""
    windows = []
    while world.step is not None or world.wake_at is not None:
        if world.step is None:
            assert world.wake_at is not None
            world.now, world.wake_at = max(world.now, world.wake_at), None
            world.send(Tick(world.now))
            continue
        windows += [part.window for part in world.step.slices if part.decodes]
        world.now += 0.01
        world.answer()
    assert world.ended == world.requests.keys()
    return windows


async def windows_of(policy: str, *, most_delay: float = 1.0) -> list[int]:
    drafted = Drafted("seer")
    world = await drafted.start()
    world.send(Admitted(world.now, request(1, (1, 2, 3), policy=policy, window=4)))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("cluster.decoding.scheduler.MOST_DELAY", most_delay)
        found = run_out(world)
    assert drafted.passes or policy == "off"
    return found


@pytest.mark.parametrize("policy", sorted(POLICIES))
async def test_each_policy_gives_the_text(policy: str) -> None:
    """The world checks every token. With one group `replicas` drafts as `chain` does."""
    found = await windows_of(policy)
    assert any(found) == (policy != "off")


async def test_a_refused_window_is_followed_by_a_full_one() -> None:
    """A candidate is wrong in every window. Told after the step, the drafter comes too late."""
    Seer.wrong_every = 3
    promptly, late = await windows_of("chain"), await windows_of("chain", most_delay=0.0)
    assert all(window == 4 for window in promptly[:-2])
    assert late.count(0) >= len(late) // 3


async def test_a_delay_that_is_too_long_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.decoding.scheduler.TRIED_AGAIN", 3)
    drafted = Drafted("seer")
    world = await drafted.start()
    delays: list[int] = []

    @contextmanager
    def before_step(num_sequences: int) -> Iterator[None]:
        delays.append(num_sequences)
        drafted.own._delay = 60.0
        yield

    monkeypatch.setattr(drafted.own, "before_step", before_step)
    world.send(Admitted(world.now, request(2, (1, 2, 3), max_tokens=60, window=1)))
    windows = run_out(world)
    # The first two are not compared with a step's time, which is not known yet.
    assert len(delays) == 2 + (len(windows) - 2) // 4


async def test_a_failure_ends_only_the_drafter_that_failed() -> None:
    """Its sequence goes on with the other one, in the same step."""
    drafted = Drafted("seer", "ngram")
    world = await drafted.start()
    world.send(Admitted(world.now, request(1, (1, 2, 3))))
    assert world.step is not None
    Seer.failures = 1
    for _ in range(3):
        world.answer()
    assert list(drafted.own.names) == ["own-1"]
    assert [one.connected for one in drafted.own.meters] == [False, True]
    assert "as it was told to" in drafted.own.meters[0].trouble
    run_out(world)
    drafted.own.stop()


async def test_a_drafter_comes_back_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.driver.at_hand.AGAIN_SECONDS", 0.01)
    drafted = Drafted("seer")
    world = await drafted.start()
    for number in range(1, MOST_FAILURES + 1):
        assert list(drafted.own.names) == ["own-0"], f"after {number - 1} failures"
        Seer.failures = 1
        world.send(Admitted(world.now, request(number, (1, 2, 3))))
        run_out(world)
        assert not drafted.own.names
        await asyncio.sleep(0.1)
    assert not drafted.own.names


async def test_a_sequence_that_cannot_be_opened_is_declined_alone() -> None:
    Seer.refuses = True
    drafted = Drafted("seer")
    world = await drafted.start()
    for number in (1, 2):
        world.send(Admitted(world.now, request(number, (1, 2, number))))
    run_out(world)
    assert list(drafted.own.names) == ["own-0"]
    assert drafted.passes


async def test_a_long_text_is_read_in_pieces() -> None:
    """An event reads two pieces at most, one before the step and one after it."""
    drafted = Drafted("ngram")
    drafted.world.max_model_len = 40_000
    drafted.world.num_blocks = 12_000
    drafted.world.join_target()
    world = await drafted.start()
    prompt = tuple(1 + place % 7 for place in range(9_000))
    world.send(Admitted(world.now, request(1, prompt)))
    (session,) = [one.session for one in drafted.own._in_use.values()]
    assert session is not None
    settled = [session.trees[1].num_settled] if 1 in session.trees else []
    while not settled or settled[-1] < 9_000:
        world.answer()
        if 1 in session.trees:
            settled.append(session.trees[1].num_settled)
    assert all(after - before <= 2 * PIECE for before, after in pairwise(settled))
    run_out(world)


class FuzzAtHand(Fuzz):
    """Random schedules with drafters at hand beside those that come and go."""

    def __init__(self, data: st.DataObject) -> None:
        super().__init__(data)
        self.milliseconds = 0
        options = {"own-0": DrafterOptions("seer"), "own-1": DrafterOptions("ngram")}
        self.own = OwnDrafters(options, clock=self.clock)
        self.world.scheduler._at_hand = self.own
        drafted = Drafted.__new__(Drafted)
        drafted.own, drafted.world, drafted.passes = self.own, self.world, 0
        asyncio.run(self.own.start(drafted))

    def clock(self) -> float:
        """Not the host's, which would make a schedule another one when hypothesis repeats it."""
        self.milliseconds += self.draw(0, 9)
        return self.milliseconds / 1000


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_schedules_keep_text_and_invariants(data: st.DataObject) -> None:
    Seer.wrong_every = data.draw(st.integers(1, 7))
    fuzz = FuzzAtHand(data)
    fuzz.world.join_target()
    for _ in range(data.draw(st.integers(5, 60))):
        fuzz.act()
    fuzz.drain()
    assert not any(one.desk and one.desk.num_open for one in fuzz.own._in_use.values())

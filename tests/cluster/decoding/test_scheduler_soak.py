"""Ten thousand steps with shrinking memory: requests come and go, the text is plain decoding's."""

from __future__ import annotations

import random

import pytest

from cluster.decoding.events import Admitted, Cancelled, DrafterJoined, Tick
from cluster.decoding.policy import POLICIES, policy_named
from cluster.decoding.prefix_cache import PrefixCache
from cluster.decoding.scheduler import Scheduler
from cluster.decoding.sequence import Sequence
from tests.cluster.decoding.pretended_drafter import PretendedDrafter
from tests.cluster.decoding.true_text import request, true_token
from tests.cluster.decoding.world import World
from workers.engine.kv_blocks import BlockKeys

pytestmark = pytest.mark.long

BLOCKS = (64, 48, 40, 32, 28, 24, 20, 18, 16, 15)
"""Numbers of blocks of 4 positions. At the end, one request may need all but two of them."""
STEPS_A_SIZE = 1000
TENANTS = ("", "a", "b")


class Soak:
    """Random admissions, drafts and cancellations, with about twice as many requests as fit."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.world = World(Scheduler(max_num_seqs=6, max_step_tokens=24), num_blocks=BLOCKS[0])
        # A prompt is the begin of one of these and something of its own.
        first, second = (tuple(self.random.choices(range(1, 50), k=30)) for _ in range(2))
        self.stems = [first, second, (*second[:8], *first[8:])]
        self.next_id = 1
        self.steps = 0

    def run(self) -> None:
        """Run with each size of memory, then until everything has ended."""
        world = self.world
        world.join_target()
        world.drafters["d"] = PretendedDrafter(self._guess)
        world.send(DrafterJoined(world.now, "d", 70))
        for num_blocks in BLOCKS:
            world.num_blocks = num_blocks
            world.lose_target()
            world.join_target()
            until = self.steps + STEPS_A_SIZE
            while self.steps < until:
                self._come_and_go()
                self._step()
        while world.ended != world.requests.keys():
            self._step()

    def _guess(self, path: list[int], seed: int) -> int:
        return true_token(path, seed) if self.random.random() < 0.7 else self.random.randrange(50)

    def _come_and_go(self) -> None:
        world, draw = self.world, self.random
        now_there = world.scheduler.num_running + world.scheduler.num_waiting
        if now_there < 12 and draw.random() < 0.5:
            stem = draw.choice(self.stems)[: draw.randrange(31)]
            prompt = (*stem, *draw.choices(range(1, 50), k=draw.randrange(1, 8)))
            if draw.random() < 0.02:
                prompt *= 3  # too long for what memory there will be at the end
            policy = draw.choice(list(POLICIES))
            asked = request(
                self.next_id,
                prompt,
                policy=policy,
                max_tokens=draw.randrange(1, 16),
                window=draw.randrange(1, 7),
                branches=1 if policy_named(policy).needs.chains_only else draw.choice((1, 1, 2)),
                tenant=draw.choice(TENANTS),
            )
            self.next_id += 1
            world.send(Admitted(world.now, asked))
        if draw.random() < 0.05:
            world.send(Cancelled(world.now, max(1, self.next_id - draw.randrange(1, 14))))

    def _step(self) -> None:
        world = self.world
        world.now += 0.01
        if self.random.random() < 0.8:
            world.draft("d")
        if world.step is not None:
            world.answer()
            self.steps += 1
        elif world.wake_at is not None:
            world.now = max(world.now, world.wake_at)
            world.send(Tick(world.now))


def test_ten_thousand_steps_in_shrinking_memory_keep_text_and_invariants() -> None:
    soak = Soak(7)
    soak.run()
    scheduler = soak.world.scheduler
    assert soak.steps >= 10_000, "steps, not waiting for drafts"
    assert len(soak.world.finished) > 1000
    assert scheduler.num_preemptions > 100, "memory was not short enough to test anything"
    assert scheduler.prefix_hit_tokens > 1000
    assert soak.world.refused, "no prompt was too long for the memory that was left"
    assert soak.world.target.num_trees > 0


def test_the_soak_notices_blocks_that_are_shared_before_they_are_verified(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: blocks are shared that hold candidates or wait for moves."""

    def careless_keep(cache: PrefixCache, sequence: Sequence) -> None:
        held = sequence.kv
        length, held.length = held.length, len(held.block_table) * 4
        held.length = min(held.length, len(sequence.tree.token_ids) // 4 * 4)
        plain, held.plain_until = held.plain_until, 10**9
        right_keep(cache, sequence)
        held.length, held.plain_until = length, plain

    right_keep = PrefixCache.keep
    monkeypatch.setattr(PrefixCache, "keep", careless_keep)
    with pytest.raises(AssertionError):
        Soak(7).run()


def test_the_soak_notices_a_key_that_leaves_out_what_was_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: equal blocks after different prefixes have the same key."""

    def careless(keys: BlockKeys, count: int, token_ids: list[int]) -> list[bytes]:
        size = keys.kind.block_size
        return [bytes(token_ids[index * size : (index + 1) * size]) for index in range(count)]

    monkeypatch.setattr(BlockKeys, "first", careless)
    with pytest.raises(AssertionError):
        Soak(7).run()

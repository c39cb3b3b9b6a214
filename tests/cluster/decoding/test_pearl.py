"""PEARL's phases on short scripts, and the text of random schedules."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from cluster.decoding.events import Admitted, DrafterJoined, Tick
from cluster.decoding.instructions import Emit, Instruction, RunStep, SendGrant, WakeAt
from cluster.decoding.scheduler import Scheduler
from tests.cluster.decoding.pretended_drafter import PretendedDrafter
from tests.cluster.decoding.scripts import (
    PROMPT,
    proposal,
    started,
    started_with,
    the_step,
    tree_request,
    verdict,
)
from tests.cluster.decoding.true_text import request, true_token
from tests.cluster.decoding.world import World
from workers.drafting.tree import Grant


def steps(instructions: list[Instruction]) -> list[RunStep]:
    return [one for one in instructions if isinstance(one, RunStep)]


def last_grant(instructions: list[Instruction]) -> Grant:
    return [one.grant for one in instructions if isinstance(one, SendGrant)][-1]


def test_pre_verify_steps_at_once_and_post_verify_waits_for_its_window() -> None:
    scheduler = started("pearl", window=3)
    # Pre-verify: the target computes the first token alone while the window is drafted.
    scheduler.handle(proposal(PROMPT, 10, 11))
    out = scheduler.handle(verdict(1, 0, 10, now=1.0))
    assert not steps(out), "two of the window's candidates are still to come"
    assert WakeAt(3.0) in out
    scheduler.handle(proposal((*PROMPT, 10, 11), 12))
    out = scheduler.handle(proposal((*PROMPT, 10, 11, 12), 13))
    assert the_step(out).slices[0].token_ids == (10, 11, 12, 13)
    # Post-verify: as many again, and the token between, may be drafted meanwhile.
    assert last_grant(out).until_position == len(PROMPT) + 1 + 3 + 1 + 3
    scheduler.handle(proposal((*PROMPT, 10, 11, 12, 13), 14, 15, 16, 17))
    out = scheduler.handle(verdict(2, 3, 14))
    assert the_step(out).slices[0].token_ids == (14, 15, 16, 17), "the bonus was as drafted"


def test_whatever_is_rejected_drops_the_next_window_and_pre_verifies() -> None:
    scheduler = started("pearl", window=2)
    scheduler.handle(proposal(PROMPT, 10, 11, 12))
    scheduler.handle(verdict(1, 0, 10))
    scheduler.handle(proposal((*PROMPT, 10, 11, 12), 13, 14, 15))
    out = scheduler.handle(verdict(2, 1, 40))
    assert the_step(out).slices[0].token_ids == (40,)
    assert last_grant(out).nodes == 3
    # The same where the bonus alone is another token than the drafter's.
    scheduler.handle(proposal((*PROMPT, 10, 11, 40), 20, 21, 22))
    out = scheduler.handle(verdict(3, 0, 20))
    assert the_step(out).slices[0].window == 2
    scheduler.handle(proposal((*PROMPT, 10, 11, 40, 20, 21, 22), 23, 24, 25))
    out = scheduler.handle(verdict(4, 2, 41))
    assert the_step(out).slices[0].token_ids == (41,)
    assert Emit(1, 4, (21, 22, 41), 2) in out


def test_it_waits_no_longer_than_its_bound() -> None:
    scheduler = started("pearl", window=4)
    scheduler.handle(proposal(PROMPT, 10, 11))
    assert not steps(scheduler.handle(verdict(1, 0, 10, now=1.0)))
    assert not steps(scheduler.handle(Tick(2.9)))
    assert the_step(scheduler.handle(Tick(3.0))).slices[0].token_ids == (10, 11)


def test_a_window_is_what_is_drafted_beside_a_step() -> None:
    scheduler = started("pearl", window=16)
    scheduler.handle(verdict(1, 0, 10))
    scheduler.handle(replace(verdict(2, 0, 11), step_seconds=0.010))
    path = (*PROMPT, 10, 11)
    scheduler.handle(replace(proposal(path, *range(12, 18)), pass_seconds=0.002))
    out = scheduler.handle(replace(verdict(3, 0, 12), step_seconds=0.010))
    # In 10 ms 5 tokens are drafted: the target's own to compare with, and a window of 4.
    assert the_step(out).slices[0].token_ids == (12, 13, 14, 15, 16)
    assert last_grant(out).nodes == 4 + 5


def test_under_coins_the_first_token_is_awaited_and_a_pending_bonus_given_up() -> None:
    asked = replace(tree_request("rejection", window=2, branches=1), policy="pearl")
    scheduler = started_with(asked)
    assert not steps(scheduler.handle(verdict(1, 0, 10, now=1.0)))
    base = (*PROMPT, 10)
    out = scheduler.handle(proposal(base, 11))
    assert the_step(out).slices[0].token_ids == (10, 11), "pre-verify: the first token"
    scheduler.handle(proposal((*base, 11), 12, 13))
    out = scheduler.handle(verdict(2, 1, 40))
    # 12 was drawn as if it came next: it has a coin of its own, the token 40 is given up.
    assert the_step(out).slices[0].token_ids == (11, 12, 13)
    out = scheduler.handle(verdict(3, 2, 14))
    assert Emit(1, 2, (12, 13, 14), 2) in out, "nothing was pending: the bonus is taken"


@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
def test_the_text_is_plain_decodings_whatever_is_drafted(right: float) -> None:
    draw = random.Random(7)
    world = World(Scheduler(wait_seconds=0.5))
    world.join_target()

    def guess(path: list[int], seed: int) -> int:
        return true_token(path, seed) if draw.random() < right else draw.randrange(50)

    world.drafters["d"] = PretendedDrafter(guess)
    world.send(DrafterJoined(world.now, "d", 70))
    for number in range(1, 5):
        asked = request(number, (number, 7, 9), policy="pearl", max_tokens=40, window=5)
        world.send(Admitted(world.now, asked))
    while len(world.finished) < 4:
        world.now += 0.01
        if draw.random() < 0.8:
            world.draft("d")
        if world.step is not None and draw.random() < 0.3:
            world.answer()
        elif world.wake_at is not None and world.now >= world.wake_at:
            world.send(Tick(world.now))
    if right == 1.0:
        assert sum(f.stats.accepted for f in world.finished.values()) > 40

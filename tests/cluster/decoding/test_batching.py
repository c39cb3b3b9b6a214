"""What goes into a step: blocks, budgets and order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cluster.decoding.events import Admitted, Cancelled, DrafterJoined
from cluster.decoding.instructions import OpenAtTarget, Slice
from cluster.decoding.prefix_cache import PrefixCache
from cluster.decoding.scheduler import Scheduler
from cluster.decoding.sequence import Sequence
from tests.cluster.decoding.pretended_drafter import PretendedDrafter
from tests.cluster.decoding.scripts import PROMPT
from tests.cluster.decoding.true_text import request, true_token
from tests.cluster.decoding.world import World


def test_few_blocks_preempt_the_youngest_and_every_text_is_whole() -> None:
    world = World(Scheduler(max_num_seqs=8, max_step_tokens=16), num_blocks=12)
    world.join_target()
    for sequence_id in range(1, 7):
        asked = request(sequence_id, PROMPT, policy="off", max_tokens=30)
        world.send(Admitted(0, asked))
    openings = 0
    while len(world.finished) < 6:
        assert world.step is not None
        openings += len(world.step.open)
        world.answer()
    assert openings > 6, "nothing was preempted: the pool was not small enough to test it"
    assert world.target.max_slices > 1


def test_a_perfect_drafter_makes_few_steps_and_long_prompts_are_cut_to_the_budget() -> None:
    world = World(Scheduler(max_num_seqs=4, max_step_tokens=16))
    world.join_target()
    world.drafters["d"] = PretendedDrafter(true_token)
    world.send(DrafterJoined(0, "d", 1000))
    world.send(Admitted(0, request(1, tuple(range(1, 41)), max_tokens=20)))
    steps = 0
    while not world.finished:
        assert world.step is not None
        assert sum(len(part.token_ids) for part in world.step.slices) <= 16
        for _ in range(5):
            world.draft("d")
        world.answer()
        steps += 1
    stats = world.finished[1].stats
    assert steps - stats.steps == 2, "40 tokens in chunks of 16 are two steps without a verdict"
    assert stats.accepted == stats.drafted > 0
    assert stats.steps <= 6


def plain_world(num_blocks: int = 250, **options: Any) -> World:
    world = World(Scheduler(max_num_seqs=8, **options), num_blocks=num_blocks)
    world.join_target()
    return world


def admit(world: World, sequence_id: int, length: int, *, first: int = 1, **options: Any) -> None:
    """Admit a request with plain decoding and a prompt of `length` tokens of its own."""
    prompt = tuple((first + sequence_id * i * i + i) % 49 + 1 for i in range(length))
    world.send(Admitted(world.now, request(sequence_id, prompt, policy="off", **options)))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Each call of PrefixCache.wanted, by the id of its sequence."""
    wanted, ids = PrefixCache.wanted, list[int]()

    def noting(cache: PrefixCache, sequence: Sequence, length: int) -> int:
        ids.append(sequence.sequence_id)
        return wanted(cache, sequence, length)

    monkeypatch.setattr(PrefixCache, "wanted", noting)
    return ids


def test_many_that_arrive_during_a_step_are_let_in_at_the_cost_of_each(
    asked: list[int],
) -> None:
    world = World(Scheduler(max_num_seqs=200, max_step_tokens=256), num_blocks=4000)
    world.join_target()
    for sequence_id in range(1, 201):
        admit(world, sequence_id, 40)
    assert len(slices(world)) == 1
    asked.clear()
    world.answer()
    assert world.scheduler.num_running == 200
    assert len(asked) <= 3 * 200


def test_what_is_promised_to_those_let_in_together_is_never_given_twice() -> None:
    """20 blocks of 4 tokens, and prompts of 6 blocks each: three run at a time."""
    world = plain_world(num_blocks=20, max_step_tokens=16)
    for sequence_id in range(1, 6):
        admit(world, sequence_id, 24, max_tokens=2)
    assert world.scheduler.num_running == 1
    world.answer()
    assert world.scheduler.num_running == 3
    while len(world.finished) < 5:
        assert world.scheduler.num_running <= 3
        world.answer()
    assert world.scheduler.num_preemptions == 0


def slices(world: World) -> dict[int, Slice]:
    assert world.step is not None
    return {part.sequence_id: part for part in world.step.slices}


def linear(tokens: int) -> float:
    return 0.010 + 0.001 * tokens


def bent(tokens: int) -> float:
    """Step time bound by memory up to 48 tokens, then by arithmetic."""
    return max(0.012, 0.00025 * tokens)


@pytest.mark.parametrize("step_seconds", [linear, bent])
def test_a_long_prompt_delays_nobodys_token_by_more_than_two_steps_of_the_same_batch(
    step_seconds: Callable[[int], float],
) -> None:
    world = plain_world(num_blocks=1000, prefix_cache=False)
    world.max_model_len = 1600
    world.step_seconds = step_seconds
    world.join_target()
    for sequence_id in (1, 2, 3):
        admit(world, sequence_id, 20, max_tokens=400)
    while not all(world.emitted[sequence_id] for sequence_id in (1, 2, 3)):
        world.answer()
    admit(world, 9, 1500, max_tokens=5)
    mixed = 0
    while not world.emitted[9]:
        fed = slices(world)
        assert {1, 2, 3} - world.finished.keys() <= fed.keys(), "somebody's token is left out"
        chunk = fed.pop(9, None)
        without = sum(len(part.token_ids) for part in fed.values())
        if chunk is not None:
            mixed += 1
            took = step_seconds(without + len(chunk.token_ids))
            assert took <= 3 * step_seconds(without)
        world.answer()
    assert mixed < 110, "1,500 tokens took too many steps: the chunks are smaller than they need be"


def test_nobody_decodes_and_prefill_takes_the_whole_step() -> None:
    world = plain_world(max_step_tokens=512)
    admit(world, 1, 600)
    assert len(slices(world)[1].token_ids) == 512


def test_a_host_that_was_busy_for_a_while_does_not_leave_chunks_of_a_token() -> None:
    world = plain_world(num_blocks=1000, max_step_tokens=512, prefix_cache=False)
    admit(world, 1, 20, max_tokens=400)
    world.answer()
    admit(world, 2, 900)
    for step in range(150):
        dear = step < 12
        world.step_seconds = (lambda tokens: 0.010 * tokens) if dear else (lambda _: 0.010)
        world.answer()
    assert world.emitted[2], "chunks did not grow"


def test_a_short_prompt_does_not_wait_for_a_long_one_before_it() -> None:
    world = plain_world(max_step_tokens=64)
    admit(world, 1, 700)
    admit(world, 2, 60)
    steps = 0
    while not world.emitted[2]:
        world.answer()
        steps += 1
    assert steps <= 4
    assert not world.emitted[1]


def test_short_prompts_that_keep_coming_do_not_starve_a_long_one() -> None:
    world = plain_world(max_step_tokens=64)
    admit(world, 1, 640)
    steps, next_id = 0, 2
    while not world.emitted[1]:
        while world.scheduler.num_running + world.scheduler.num_waiting < 8:
            admit(world, next_id, 30, max_tokens=1)
            next_id += 1
        world.answer()
        steps += 1
    assert 15 < steps <= 2 * 640 / 64 + 2, "half of each step is the oldest's"


def test_a_preempted_sequence_keeps_its_place_and_its_tokens() -> None:
    world = plain_world(num_blocks=12, prefix_cache=False)
    for sequence_id in (1, 2, 3):
        admit(world, sequence_id, 9, max_tokens=30)
    while world.scheduler.num_preemptions == 0:
        world.answer()
    admit(world, 4, 3, max_tokens=30)
    assert [one.sequence_id for one in world.scheduler._state.waiting] == [3, 4]
    assert world.emitted[3], "it had some already"
    while len(world.finished) < 4:
        world.answer()


def test_equal_prefixes_are_computed_once_and_read_by_all() -> None:
    world = plain_world(max_step_tokens=16)
    stem = tuple(range(1, 22))
    for sequence_id in (1, 2, 3):
        asked = request(sequence_id, (*stem, 30 + sequence_id), policy="off")
        world.send(Admitted(world.now, asked))
    # The others wait for what the first computes, then begin behind it.
    assert set(slices(world)) == {1}
    world.answer()
    assert slices(world)[1].start == 16
    opened: dict[int, OpenAtTarget] = {}
    while opened.keys() != {2, 3}:
        world.answer()
        assert world.step is not None
        opened |= {one.sequence_id: one for one in world.step.open}
    table = world.target.tables[1]
    assert all(one.shared_blocks == tuple(table[:5]) for one in opened.values())
    assert all(one.token_ids == stem[:20] for one in opened.values())
    while len(world.finished) < 3:
        world.answer()
    assert world.scheduler.prefix_hit_tokens == 40


def test_a_prompt_that_was_computed_whole_is_left_its_last_token() -> None:
    world = plain_world()
    prompt = tuple(range(1, 18))  # four blocks and a token
    starts = []
    # Of four full blocks the last is computed again, for the logits of its last token.
    for sequence_id, length in ((1, 17), (2, 17), (3, 16)):
        asked = request(sequence_id, prompt[:length], policy="off")
        world.send(Admitted(world.now, asked))
        starts.append(slices(world)[sequence_id].start)
        while world.step is not None:
            world.answer()
    assert starts == [0, 16, 12]
    assert world.scheduler.prefix_hit_tokens == 28


def test_other_tenants_and_a_cache_that_is_off_share_nothing() -> None:
    prompt = tuple(range(1, 30))
    for tenants, enabled in ((("a", "b"), True), (("a", "a"), False)):
        world = World(Scheduler(prefix_cache=enabled))
        world.join_target()
        for sequence_id, tenant in enumerate(tenants):
            asked = request(sequence_id, prompt, policy="off", tenant=tenant)
            world.send(Admitted(world.now, asked))
            while sequence_id not in world.finished:
                world.answer()
        assert world.scheduler.prefix_hit_tokens == 0


def test_who_waits_for_a_prefix_begins_itself_when_the_other_is_gone() -> None:
    world = plain_world(max_step_tokens=8)
    stem = tuple(range(1, 30))
    for sequence_id in (1, 2):
        world.send(Admitted(world.now, request(sequence_id, stem, policy="off")))
    assert set(slices(world)) == {1}
    world.send(Cancelled(world.now, 1))
    world.answer()
    assert set(slices(world)) == {2}


def test_what_a_smaller_target_can_never_hold_is_refused_with_the_numbers() -> None:
    world = plain_world(num_blocks=64)
    admit(world, 1, 100)
    admit(world, 2, 10)
    world.lose_target()
    world.num_blocks = 16
    world.join_target()
    assert "100 prompt tokens and 20 to generate exceed the 64 tokens" in str(
        world.refused[1].error
    )
    assert set(slices(world)) == {2}
    admit(world, 3, 60)
    assert world.refused.keys() == {1, 3}

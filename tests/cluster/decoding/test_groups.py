"""Several target groups: each sequence runs on one of them, and none on a group that is gone."""

from __future__ import annotations

import pytest

from cluster.decoding.batching import Batching
from cluster.decoding.events import Admitted, Cancelled, StepDone
from cluster.decoding.scheduler import Scheduler
from paceline.errors import PromptTooLongError, ProtocolError
from tests.cluster.decoding.true_text import request
from tests.cluster.decoding.world import World


def world_of(num_groups: int, *, max_num_seqs: int = 4, num_blocks: int = 64) -> World:
    """A world whose groups have all joined."""
    scheduler = Scheduler(max_num_seqs=max_num_seqs, num_groups=num_groups)
    world = World(scheduler, num_blocks=num_blocks, num_groups=num_groups)
    for group in range(num_groups):
        world.join_target(group)
    return world


def admit(world: World, *numbers: int, length: int = 5) -> None:
    for number in numbers:
        prompt = tuple(range(number, number + length))
        asked = request(number, prompt, policy="off")
        world.send(Admitted(world.now, asked))


def sequences(world: World, group: int) -> set[int]:
    """The sequences in the group's step in flight."""
    return {part.sequence_id for part in world.steps[group].slices}


def members(world: World, group: int) -> set[int]:
    """The sequences that run in the group."""
    return set(world.scheduler._state.groups[group].batching.running)


def drain(world: World) -> None:
    """Answer steps until all requests are done."""
    while world.steps:
        world.answer()
    assert world.finished.keys() == world.requests.keys()


def test_requests_go_to_the_group_that_has_the_fewest() -> None:
    world = world_of(3)
    admit(world, 1, 2, 3)
    assert [sequences(world, group) for group in range(3)] == [{1}, {2}, {3}]
    admit(world, 4)
    world.answer(2)
    (last,) = (one for one in world.scheduler._state.running if one.sequence_id == 4)
    assert last.kv.group == 2, "all have one; this one is free"
    drain(world)


def test_groups_step_by_themselves() -> None:
    """Each group numbers its own steps, and a late one delays no other."""
    world = world_of(2)
    admit(world, 1, 2)
    for number in range(2, 8):
        world.answer(1)
        assert (world.steps[0].step, world.steps[1].step) == (1, number)
    assert (len(world.emitted[1]), len(world.emitted[2])) == (0, 6)
    drain(world)


def test_an_answer_of_a_group_that_has_no_such_step() -> None:
    world = world_of(2)
    admit(world, 1)
    with pytest.raises(ProtocolError, match="not in flight"):
        world.send(StepDone(world.now, 1, (), group=1))
    drain(world)


def test_sequences_of_a_lost_group_go_on_elsewhere() -> None:
    world = world_of(2)
    admit(world, 1, 2)
    world.answer(0)
    world.answer(1)
    world.lose_target(0)
    assert sequences(world, 1) == {2}, "it is at work"
    world.answer(1)
    assert sequences(world, 1) == {1}, "a suspect, which is tried alone, in every other step"
    while sequences(world, 1) != {1, 2}:
        world.answer(1)
    drain(world)
    world.join_target(0)
    admit(world, 3)
    assert sequences(world, 0) == {3}
    drain(world)


def test_who_was_first_stays_first_though_two_groups_give_sequences_back() -> None:
    world = world_of(2, max_num_seqs=2)
    admit(world, 1, 2, 3, 4, 5)
    world.answer(0)
    world.answer(1)
    world.lose_target(1)
    world.lose_target(0)
    waiting = [one.sequence_id for one in world.scheduler._state.waiting]
    assert waiting == [1, 2, 3, 4, 5]
    world.join_target(1)
    assert sequences(world, 1) == {1}, "a suspect, tried alone"
    drain(world)
    ended = list(world.finished)
    assert ended == sorted(ended)


def test_a_sequence_of_a_lost_group_that_is_older_than_those_elsewhere_gives_no_blocks_back() -> (
    None
):
    world = world_of(2, num_blocks=12)
    admit(world, 1, 2, 3, 4, length=9)
    for _ in range(3):
        world.answer(0)
        world.answer(1)
    world.lose_target(0)
    drain(world)


def test_a_prefix_that_a_group_has_computed_brings_its_like_there() -> None:
    world = world_of(2)
    prompt = tuple(range(1, 14))
    for number in (1, 2):
        asked = request(number, prompt, policy="off", max_tokens=3)
        world.send(Admitted(world.now, asked))
        if number == 1:
            world.lose_target(0)
            drain(world)
            world.join_target(0)
    assert sequences(world, 1) == {2}
    assert len(world.steps[1].open[0].token_ids) == 12
    drain(world)


def test_a_move_to_blocks_of_another_size_keeps_the_text() -> None:
    """Keys of smaller blocks are not keys of larger ones: these two agree in 4 tokens, not in 8.

    World.send compares the text with plain decoding's.
    """
    world = world_of(2)
    world.join_target(1, block_size=8)
    world.lose_target(1)
    shared = (1, 2, 3, 4)
    for number in (1, 2):
        prompt = (*shared, *range(10 * number, 10 * number + 9))
        asked = request(number, prompt, policy="off")
        world.send(Admitted(world.now, asked))
    while min(map(len, world.emitted.values())) < 2:
        world.answer(0)
    world.join_target(1, block_size=8)
    world.lose_target(0)
    drain(world)


def test_a_group_that_joins_takes_sequences_that_wait() -> None:
    world = world_of(1, max_num_seqs=2)
    admit(world, 1, 2, 3)
    world.scale(2)
    assert world.scheduler.num_waiting == 1, "it has not joined yet"
    world.join_target(1)
    assert sequences(world, 1) == {3}
    drain(world)


def test_sequences_leave_a_group_that_retires_without_being_suspects() -> None:
    """The step in flight is answered first; then they are computed again where there is room."""
    world = world_of(2)
    admit(world, 1, 2)
    for group in (0, 1):
        world.answer(group)
    world.scale(1)
    assert sequences(world, 1) == {2}
    assert world.scheduler.is_busy(1)
    world.answer(1)
    assert 1 not in world.steps
    assert not world.scheduler.is_busy(1)
    assert len(world.emitted[2]) == 2
    while sequences(world, 0) != {1, 2}:
        world.answer(0)
    assert not world.lost_steps
    world.lose_target(1)
    assert [group.number for group in world.scheduler._state.groups] == [0]
    drain(world)


def test_others_do_not_wait_for_the_step_of_a_group_that_retires() -> None:
    """They are let in at once. What is in the step has its place kept meanwhile."""
    world = world_of(2, max_num_seqs=3)
    admit(world, 1, 2)
    world.scale(1)
    assert sequences(world, 1) == {2}, "a step that may last"
    admit(world, 3, 4)
    world.answer(0)
    assert members(world, 0) == {1, 3}, "the third place is kept for 2"
    world.answer(1)
    world.answer(0)
    assert members(world, 0) == {1, 2, 3}
    drain(world)


def test_the_place_of_what_was_lost_with_a_group_that_retires_is_kept_no_more() -> None:
    world = world_of(2, max_num_seqs=2)
    admit(world, 1, 2)
    world.scale(1)
    admit(world, 3)
    world.answer(0)
    world.send(Cancelled(world.now, 2))
    world.lose_target(1)
    world.answer(0)
    assert members(world, 0) == {1, 3}
    drain(world)


def test_blocks_are_kept_for_what_is_in_the_step_of_a_group_that_retires() -> None:
    """No sequence is let in whose blocks one that moves will take, to be computed twice."""
    world = world_of(2, num_blocks=12)
    admit(world, 1, 2, length=17)
    world.scale(1)
    admit(world, 3, length=9)
    world.answer(0)
    assert members(world, 0) == {1}
    world.answer(1)
    world.answer(0)
    assert members(world, 0) == {1, 2}
    drain(world)


def test_sequences_go_on_in_a_group_that_retires_until_there_is_room_elsewhere() -> None:
    """They come before those that wait, however many of these there are."""
    world = world_of(2, max_num_seqs=1)
    world.send(Admitted(world.now, request(1, (1, 2, 3), policy="off", max_tokens=4)))
    admit(world, 2, 3)
    world.scale(1)
    world.answer(0)
    while 1 not in world.finished:
        world.answer(1)
        assert sequences(world, 1) == {2}, "it does not stand still"
        world.answer(0)
    assert 0 not in world.steps
    assert world.scheduler.num_waiting == 1, "its step in flight is answered first"
    world.answer(1)
    assert sequences(world, 0) == {2}
    drain(world)


def test_a_group_that_retires_serves_alone_while_the_others_are_lost() -> None:
    world = world_of(3)
    admit(world, 1, 2)
    world.lose_target(0)
    world.scale(1)
    world.lose_target(2)
    assert len(world.scheduler._state.groups) == 2
    while not world.scheduler.num_waiting or len(world.emitted[2]) < 3:
        world.answer(1)
    assert world.scheduler.is_busy(1), "2 goes on, 1 waits for group 0"
    world.join_target(0)
    drain(world)
    world.lose_target(1)
    world.scale(2)
    world.join_target(1)
    admit(world, 3, 4)
    assert sequences(world, 1)
    drain(world)


def test_no_group_is_added_before_those_that_retire_are_gone() -> None:
    """Else the number of one that retires would not be free for a new one, with more behind it."""
    world = world_of(2)
    admit(world, 1, 2)
    world.scale(1)
    world.scale(3)
    world.lose_target(1)
    world.scale(3)
    world.join_target(1)
    world.join_target(2)
    admit(world, 3, 4, 5)
    assert sequences(world, 1)
    assert sequences(world, 2)
    drain(world)


@pytest.mark.parametrize("is_lead", [True, False])
def test_a_group_that_retires_while_it_shares_a_sequence(is_lead: bool) -> None:
    world = world_of(2)
    if is_lead:  # The sequence is admitted in group 1, and group 0 helps.
        world.lose_target(0)
    world.send(Admitted(0.0, request(1, (1, 2, 3), policy="replicas", max_tokens=12)))
    if is_lead:
        world.join_target(0)
    while len(world.emitted[1]) < 3:
        world.answer()
    (running,) = world.scheduler._state.running
    assert running.replicas
    assert running.kv.group == int(is_lead)
    world.scale(1)
    while world.scheduler.is_busy(1):
        world.answer(1)
    world.lose_target(1)
    drain(world)


def test_a_caller_that_goes_away_while_its_group_is_at_work() -> None:
    world = world_of(2)
    admit(world, 1, 2)
    world.send(Cancelled(world.now, 2))
    assert 2 not in world.finished
    world.answer(1)
    assert 2 in world.finished
    drain(world)


def test_what_one_group_can_never_hold_is_refused() -> None:
    world = world_of(2)
    world.num_blocks = 8
    world.join_target(1)
    with pytest.raises(PromptTooLongError, match="32 tokens"):
        world.scheduler.check_fits(20, 20)


def test_idle_share_is_that_of_all_groups() -> None:
    world = world_of(2)
    admit(world, 1)
    while not world.finished:
        step = world.steps[0]
        world.now += world.step_seconds(sum(len(part.token_ids) for part in step.slices))
        world.answer()
    assert world.scheduler.speculation().target_idle == pytest.approx(0.5)


def test_idle_share_counts_a_group_from_when_it_was_added() -> None:
    """Half of a time with one group, then half of it with two, of which one is busy."""
    world = world_of(1)
    for number in (1, 2):
        admit(world, number)
        while number not in world.finished:
            step = world.steps[0]
            world.now += world.step_seconds(sum(len(part.token_ids) for part in step.slices))
            world.answer()
        world.scale(2)
        world.join_target(1)
    assert world.scheduler.speculation().target_idle == pytest.approx(1 / 3, abs=0.02)


def test_kv_that_a_lost_group_had_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: sequences keep KV that they had on a lost group."""
    right = Batching.lose_target

    def careless(batching: Batching) -> None:
        lengths = {one.sequence_id: one.kv.length for one in batching.running.values()}
        right(batching)
        for one in batching.waiting:
            one.kv.length = lengths.get(one.sequence_id, 0)

    monkeypatch.setattr(Batching, "lose_target", careless)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        test_sequences_of_a_lost_group_go_on_elsewhere()

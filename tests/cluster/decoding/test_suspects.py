"""The target is lost during a step: each sequence of the step is tried alone."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from cluster.decoding.events import (
    Admitted,
    Cancelled,
    DrafterJoined,
    SequenceVerdict,
    StepDone,
)
from cluster.decoding.instructions import Finish, FinishReason, Refuse, RunStep
from cluster.decoding.scheduler import Scheduler
from cluster.decoding.waiting import MOST_LOST_STEPS
from paceline.errors import RequestFaultError
from tests.cluster.decoding.pretended_drafter import PretendedDrafter
from tests.cluster.decoding.true_text import request, true_token
from tests.cluster.decoding.world import World
from workers.target.faults import MOST_FAILED_STEPS


def world_of(*numbers: int, num_groups: int = 1, max_num_seqs: int = 8) -> World:
    """A world for requests whose prompts have one token."""
    scheduler = Scheduler(max_num_seqs=max_num_seqs, num_groups=num_groups)
    world = World(scheduler, num_groups=num_groups)
    for group in range(num_groups):
        world.join_target(group)
    admit(world, *numbers)
    while not all(world.emitted.values()):
        for group in list(world.steps):
            world.answer(group)
    return world


def admit(world: World, *numbers: int, policy: str = "off") -> None:
    for number in numbers:
        prompt = (number, number + 1, number + 2, number + 3, number + 4)
        world.send(Admitted(world.now, request(number, prompt, policy=policy, max_tokens=12)))


def in_step(world: World, group: int = 0) -> set[int]:
    return {part.sequence_id for part in world.steps[group].slices}


def lose(world: World, group: int = 0) -> None:
    """The target is lost, and back at once."""
    world.lose_target(group)
    world.join_target(group)


def poisoned(*numbers: int) -> Callable[[RunStep], bool]:
    return lambda step: any(part.sequence_id in numbers for part in step.slices)


def run(world: World, ends_target: Callable[[RunStep], bool]) -> int:
    """Run to the end, a step at a time. Returns how often the target was lost."""
    losses = 0
    while world.steps:
        step = world.step
        assert step is not None
        if ends_target(step):
            lose(world, step.group)
            losses += 1
        else:
            world.answer(step.group)
    assert world.ended == world.requests.keys()
    return losses


def test_each_is_tried_alone_and_the_others_wait() -> None:
    world = world_of(1, 2, 3)
    assert in_step(world) == {1, 2, 3}
    lose(world)
    admit(world, 4)
    seen = []
    while in_step(world) != {1, 2, 3, 4}:
        seen.append(in_step(world))
        world.answer()
    # Alone until its second verdict; who has been cleared goes on in every other step.
    first, second, third = [{1}, {1}], [{1}, {2}] * 2, [{1, 2}, {3}] * 2
    assert seen[:10] == [*first, *second, *third]
    assert seen[10:] == [{1, 2, 3}] * len(seen[10:]), "4 has its turn when no suspect is left"
    assert run(world, lambda step: False) == 0


def test_a_request_that_ends_the_target_is_refused_and_others_are_hit_at_most_twice() -> None:
    """The position of the request among the others does not matter. All came before the loss."""
    for poison in (1, 2, 3):
        world = world_of(1, 2, 3)
        losses = run(world, poisoned(poison))
        assert losses <= 3
        assert world.refused.keys() == {poison}
        error = world.refused[poison].error
        assert isinstance(error, RequestFaultError)
        assert f"{losses} steps" in str(error)
        assert max(world.hits[number] for number in {1, 2, 3} - {poison}) <= 2
        assert not world.scheduler._state.waiting.suspects


def test_several_that_end_the_target_hit_others_no_more_often() -> None:
    world = world_of(1, 2, 3, 4, 5)
    run(world, poisoned(1, 3, 4))
    assert world.refused.keys() == {1, 3, 4}
    assert max(world.hits[number] for number in (2, 5)) <= 2


def test_one_that_ends_the_target_while_it_decodes_is_found_though_its_prefill_goes_well() -> None:
    world = world_of(1, 2, 3)
    run(world, lambda step: any(p.sequence_id == 2 and len(p.token_ids) == 1 for p in step.slices))
    assert world.refused.keys() == {2}
    assert max(world.hits[number] for number in (1, 3)) <= 2


def test_a_request_without_company_survives_losses_that_are_not_its_fault() -> None:
    """The losses exceed those after which a worker's process is ended: the new one gets a try."""
    world = world_of(1)
    for _ in range(MOST_FAILED_STEPS):
        lose(world)
    assert run(world, lambda step: False) == 0
    assert world.finished[1].reason is FinishReason.LENGTH

    world = world_of(1)
    assert run(world, poisoned(1)) == MOST_LOST_STEPS
    assert isinstance(world.refused[1].error, RequestFaultError)


def test_nobody_is_blamed_for_a_target_that_answers_nobody() -> None:
    world = world_of(1, 2)
    losses = iter(range(MOST_FAILED_STEPS))
    assert run(world, lambda step: next(losses, None) is not None) == MOST_FAILED_STEPS
    assert not world.refused


def test_verdicts_clear_a_suspect() -> None:
    world = world_of(1)
    for _ in range(3):
        for _ in range(MOST_LOST_STEPS - 1):
            lose(world)
        world.answer()
        world.answer()
    assert not world.refused
    assert run(world, lambda step: False) == 0


def test_a_loss_between_steps_makes_nobody_a_suspect() -> None:
    scheduler = Scheduler()
    world = World(scheduler)
    admit(world, 1, 2)
    lose(world)
    assert in_step(world) == {1, 2}


def test_a_suspect_that_is_cancelled_leaves_the_line_to_others() -> None:
    world = world_of(1, 2)
    lose(world)
    admit(world, 3)
    world.send(Cancelled(world.now, 2))
    world.send(Cancelled(world.now, 1))
    world.answer()
    assert in_step(world) == {3}
    assert not world.scheduler._state.waiting.suspects


def test_suspects_of_one_group_are_tried_beside_who_runs_in_another() -> None:
    """Sequences of the other group wait for one step at a time, and are hit once."""
    world = world_of(1, 2, 3, 4, num_groups=2)
    assert (in_step(world, 0), in_step(world, 1)) == ({1, 3}, {2, 4})
    world.lose_target(0)
    world.answer(1)
    assert in_step(world, 1) == {1}
    world.answer(1)
    assert in_step(world, 1) == {2, 4}
    world.join_target(0)
    assert in_step(world, 0) == {3}
    run(world, poisoned(1))
    assert world.refused.keys() == {1}
    assert max(world.hits[number] for number in (2, 3, 4)) <= 2


def test_one_that_several_groups_verify_is_tried_alone_in_each() -> None:
    scheduler = Scheduler(num_groups=2)
    world = World(scheduler, num_groups=2)
    world.join_target(0)
    world.join_target(1)
    admit(world, 1, policy="replicas")
    world.answer(0)
    world.answer()
    world.lose_target(0)
    admit(world, 2)
    world.join_target(0)
    assert run(world, lambda step: False) == 0
    assert world.finished.keys() == {1, 2}


@pytest.mark.parametrize("num_groups", [1, 2, 3])
def test_random_poison_is_found_whoever_is_there(num_groups: int) -> None:
    """Random: which request is poison, when others come, and when groups answer."""
    draw = random.Random(num_groups)
    for _ in range(40):
        count = draw.randint(2, 7)
        world = world_of(*range(1, count + 1), num_groups=num_groups, max_num_seqs=count)
        poison = set(draw.sample(range(1, count + 1), draw.randint(1, count - 1)))
        before = set(world.requests)
        while world.steps:
            step = world.steps[draw.choice(list(world.steps))]
            if poisoned(*poison)(step):
                lose(world, step.group)
            else:
                world.answer(step.group)
            if len(world.requests) < 10 and draw.random() < 0.2:
                admit(world, len(world.requests) + 1)
        assert world.ended == world.requests.keys()
        assert world.refused.keys() == poison
        innocent = before - poison
        assert max(world.hits[number] for number in innocent) <= 2 * num_groups


def test_an_error_in_place_of_a_verdict_ends_that_request_alone() -> None:
    world = world_of(1, 2)
    step = world.steps[0]
    verdicts = world.targets[0].run(step)
    world.steps.clear()
    failed = SequenceVerdict(1, 0, 0, error="all tokens are masked")
    world.send(StepDone(world.now, step.step, (failed, verdicts[1])))
    error = world.refused[1].error
    assert isinstance(error, RequestFaultError)
    assert "all tokens are masked" in str(error)
    assert in_step(world) == {2}
    assert run(world, lambda step: False) == 0


@pytest.mark.parametrize("policy", ["chain", "fanout"])
def test_candidates_that_the_target_fails_at_are_dropped_and_not_the_request(
    policy: str,
) -> None:
    """Plain decoding does not see the candidates. The sequence's drafter drafts for it no more."""
    world = World(Scheduler())
    world.join_target()
    world.drafters["d"] = PretendedDrafter(lambda path, seed: true_token(path, seed))
    world.send(DrafterJoined(world.now, "d", 1000))
    admit(world, 1, policy=policy)
    world.answer()
    world.draft("d")
    world.draft("d")
    world.answer()
    step = world.steps.pop(0)
    assert step.slices[0].window > 0
    failed = SequenceVerdict(1, 0, 0, error="expected finite logits, got nan")
    world.send(StepDone(world.now, step.step, (failed,)))
    again = world.steps[0]
    assert (again.close, again.slices[0].start, again.slices[0].window) == ((1,), 0, 0)
    assert run(world, lambda step: any(part.window for part in step.slices)) == 0
    assert world.finished[1].reason is FinishReason.LENGTH


def test_an_error_without_candidates_after_one_with_is_the_requests_own() -> None:
    world = world_of(1)
    step = world.steps.pop(0)
    failed = SequenceVerdict(1, 0, 0, error="expected finite logits, got nan")
    world.send(StepDone(world.now, step.step, (failed,)))
    assert world.refused.keys() == {1}


def test_an_error_for_one_that_its_caller_has_left_is_its_end() -> None:
    world = world_of(1, 2)
    step = world.steps[0]
    world.send(Cancelled(world.now, 1))
    world.steps.clear()
    failed = SequenceVerdict(1, 0, 0, error="all tokens are masked")
    verdicts = world.targets[0].run(step)
    out = world.scheduler.handle(StepDone(world.now, step.step, (failed, verdicts[1])))
    assert [one.reason for one in out if isinstance(one, Finish)] == [FinishReason.CANCELLED]
    assert not [one for one in out if isinstance(one, Refuse)]


def test_blocks_of_a_sequence_in_error_are_given_to_nobody_as_a_prefix() -> None:
    """They may contain NaN."""
    scheduler = Scheduler()
    world = World(scheduler)
    world.join_target()
    prompt = tuple(range(1, 14))
    world.send(Admitted(world.now, request(1, prompt, policy="off")))
    step = world.steps.pop(0)
    failed = SequenceVerdict(1, 0, 0, error="expected finite logits, got nan")
    world.send(StepDone(world.now, step.step, (failed,)))
    world.send(Admitted(world.now, request(2, prompt, policy="off")))
    assert world.steps[0].open[0].token_ids == ()

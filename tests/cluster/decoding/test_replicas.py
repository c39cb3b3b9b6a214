"""The policy `replicas`, step by step: which group verifies what, and when."""

from __future__ import annotations

import pytest

from cluster.decoding.events import Admitted, Cancelled, DrafterJoined
from cluster.decoding.instructions import Slice
from cluster.decoding.sequence import Replica
from cluster.driver.fitting import check_layout
from paceline.errors import InvalidRequestError
from tests.cluster.decoding.pretended_drafter import PretendedDrafter
from tests.cluster.decoding.test_groups import drain, sequences, world_of
from tests.cluster.decoding.true_text import request, true_token
from tests.cluster.decoding.world import World

PROMPT = (1, 2, 3, 4, 5)


def drafting_world(num_groups: int, *, wrong_at: int | None = None) -> World:
    """One request, prefilled on all groups, with a drafter that is wrong only at `wrong_at`."""
    world = world_of(num_groups)

    def guess(path: list[int], seed: int) -> int:
        right = true_token(path, seed)
        return right + 1 if len(path) == wrong_at else right

    world.drafters["d"] = PretendedDrafter(guess)
    world.send(DrafterJoined(world.now, "d", 1000))
    admit(world, 1)
    for group in range(num_groups):
        world.answer(group)
    return world


def admit(world: World, number: int) -> None:
    asked = request(number, PROMPT, policy="replicas", max_tokens=40, window=4)
    world.send(Admitted(world.now, asked))


def slice_of(world: World, group: int) -> Slice:
    (part,) = world.steps[group].slices
    return part


def candidates_of(world: World, group: int) -> tuple[int, ...]:
    part = slice_of(world, group)
    return part.token_ids[len(part.token_ids) - part.window :]


def test_the_next_window_is_verified_while_the_one_before_is() -> None:
    world = drafting_world(2)
    assert candidates_of(world, 0) == ()
    assert 1 not in world.steps, "there is nothing beyond what is being verified"
    world.draft("d")
    assert len(candidates_of(world, 1)) == 1
    world.draft("d")
    assert len(world.emitted[1]) == 1, "neither has answered"
    # The second group tells what the first one would have, and the token after it.
    world.answer(1)
    assert len(world.emitted[1]) == 3
    assert candidates_of(world, 1) == (), "the second candidate was that token"
    world.answer(0)
    assert len(world.emitted[1]) == 3, "that was told already"
    # It is fed what it has not seen, then what is beyond what the other one verifies.
    world.draft("d")
    part = slice_of(world, 0)
    assert (part.start, len(part.token_ids), part.window) == (len(PROMPT) + 1, 3, 1)
    drain(world)


def test_a_group_that_never_answers_holds_nobody_up() -> None:
    world = drafting_world(2)
    late = min(world.steps)
    while 1 not in world.finished:
        world.draft("d")
        world.answer(1 - late)
    assert late in world.steps
    world.lose_target(late)
    drain(world)


def test_a_wrong_candidate_makes_what_stood_on_it_worthless() -> None:
    world = drafting_world(2, wrong_at=len(PROMPT) + 2)
    for _ in range(3):
        world.draft("d")
    world.answer(0)  # the first candidate is right
    assert len(candidates_of(world, 0)) == 2, "the second is not"
    world.answer(0)
    assert len(world.emitted[1]) == 3
    counts = world.scheduler.totals.counts
    assert (counts.diverged, counts.wasted) == (1, 1)
    drain(world)


def test_groups_that_are_free_serve_those_that_have_the_fewest() -> None:
    world = world_of(5)
    admit(world, 1)
    admit(world, 2)
    world.answer(3)
    serving = [len(group.batching.running) for group in world.scheduler._state.groups]
    assert serving == [1] * 5
    replicas = [len(one.replicas) for one in world.scheduler._state.running]
    assert sorted(replicas) == [1, 2]
    drain(world)
    assert not any(group.batching.running for group in world.scheduler._state.groups)


def test_a_request_that_comes_gets_a_group_of_its_own() -> None:
    world = drafting_world(2)
    group = world.scheduler._state.groups[1]
    assert [isinstance(one, Replica) for one in group.batching.running.values()] == [True]
    admit(world, 2)
    assert group.batching.running.keys() == {2}, "it was free, for want of candidates"
    assert not any(one.replicas for one in world.scheduler._state.running)
    assert sequences(world, 1) == {2}
    world.send(Cancelled(world.now, 2))
    drain(world)


def test_the_sequence_goes_on_at_once_where_another_group_has_it() -> None:
    world = drafting_world(2)
    (lead,) = world.scheduler._state.running
    assert lead.kv.group is not None
    kv_length = lead.replicas[0].kv.length
    world.lose_target(lead.kv.group)
    assert (lead.kv.length, lead.replicas) == (kv_length, [])
    assert slice_of(world, lead.kv.group).start == kv_length
    drain(world)


def test_one_group_is_too_few() -> None:
    with pytest.raises(InvalidRequestError, match=r"at least 2 target groups.* has 1"):
        check_layout("replicas", 1, 1)
    check_layout("replicas", 1, 2)

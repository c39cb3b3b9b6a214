"""Ranks meet, add up in one order, notice a rank that is out of step, and fail in time."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from paceline.errors import ConfigError, InternalError, WorkerLostError
from tests.workers.engine.parallel.ranks import Ranks
from workers.engine.parallel.group import Deadlines, RankGroup
from workers.engine.parallel.weight_cuts import Place


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_a_sum_is_made_in_the_order_of_the_ranks_wherever_a_row_lies(degree: int) -> None:
    generator = torch.Generator().manual_seed(degree)
    parts = [torch.randn(40, 33, generator=generator) for _ in range(degree)]
    expected = parts[0]
    for part in parts[1:]:
        expected = expected + part
    with Ranks(degree) as ranks:
        ranks.meet("once")

        def sum_of(rows: slice, group: RankGroup) -> torch.Tensor:
            return group.sum(parts[group.place.rank][rows])

        for rows in (slice(0, 40), slice(7, 8), slice(20, 31)):
            for total in ranks.together(partial(sum_of, rows)):
                assert torch.equal(total, expected[rows])


def test_ranks_that_differ_are_told_on_all_of_them() -> None:
    with Ranks(3) as ranks:
        ranks.meet("once")
        ranks.together(lambda group: group.compare(7, 1))
        errors = ranks.errors(lambda group: group.compare(7, int(group.place.rank == 2)))
        for error in errors:
            assert isinstance(error, WorkerLostError)
            assert "content) is [7, 0] at rank 0, but [7, 1] at rank 2" in str(error)
        # They are still aligned.
        ranks.together(lambda group: group.compare(8, 0))


def test_a_rank_that_stays_away_from_a_meeting_is_noticed() -> None:
    with (
        Ranks(2, deadlines=Deadlines(meeting=0.5, collective=120.0)) as ranks,
        pytest.raises(WorkerLostError, match=r"did not meet the other shards.* within 0\.5 s"),
    ):
        ranks.join(ranks.groups[0], "alone")


def test_a_rank_that_stays_away_from_a_sum_is_noticed() -> None:
    """Both meet with enough time, because the meeting has a collective too."""
    with Ranks(2, deadlines=Deadlines(meeting=120.0, collective=5.0)) as ranks:
        ranks.meet("both")
        with pytest.raises(WorkerLostError, match="waited for it longer than 5 s"):
            ranks.groups[1].sum(torch.ones(2, 2))
        with pytest.raises(InternalError, match="have not met"):
            ranks.groups[1].sum(torch.ones(2, 2))
        with pytest.raises(WorkerLostError):
            ranks.groups[0].sum(torch.ones(2, 2))
        ranks.meet("again")


def test_a_rank_that_leaves_frees_those_who_wait_and_all_can_meet_again() -> None:
    with Ranks(3) as ranks:
        ranks.meet("first")

        def leave_or_wait(group: RankGroup) -> None:
            if group.place.rank == 1:
                group.leave()
            else:
                group.sum(torch.ones(2, 2))

        first, second, third = ranks.errors(leave_or_wait)
        assert isinstance(first, WorkerLostError)
        assert second is None
        assert isinstance(third, WorkerLostError)
        ranks.meet("second")
        for total in ranks.together(lambda group: group.sum(torch.ones(2))):
            assert total.tolist() == [3.0, 3.0]


def test_rank_0_alone_gathers() -> None:
    with Ranks(2) as ranks:
        ranks.meet("once")
        mine, theirs = ranks.together(lambda g: g.gather(torch.full((1,), float(g.place.rank))))
        assert theirs is None
        assert mine is not None
        assert torch.cat(mine).tolist() == [0.0, 1.0]


def test_collectives_use_the_interface_that_is_named() -> None:
    with Ranks(2, interface="lo") as ranks:
        ranks.meet("once")
        totals = ranks.together(lambda group: group.sum(torch.ones(3)))
        assert [total.tolist() for total in totals] == [[2.0] * 3] * 2
    with pytest.raises(ConfigError, match=r"no network interface 'eth99'; it has .*lo"):
        RankGroup(Place(0, 2), host="127.0.0.1", interface="eth99")

"""Messages that come late: later texts, the same ones, and the same again with the same seed."""

from __future__ import annotations

from cluster.decoding.policies import PolicyName
from cluster.simulation.fleet import Fleet
from cluster.simulation.layout import Layout, Load
from cluster.simulation.unrest import Unrest
from workers.emulated.profiles import load_profile
from workers.emulated.replay_text import Guess


def last_at(unrest: Unrest | None) -> float:
    target, drafter = load_profile("70b-4xh100"), load_profile("1b-h100")
    layout = Layout(target, PolicyName.AUTO, 8, drafter=drafter, drafters=1, unrest=unrest)
    fleet = Fleet(layout, Load(2, 16, 40, Guess(0.85, 0.5, seed=1), concurrency=1))
    fleet.run()
    fleet.check_end()
    assert fleet.same_text
    return max(one.last_at for one in fleet.answered)


def test_unrest_delays_and_changes_no_text() -> None:
    quiet, restless = last_at(None), last_at(Unrest(0.3, 50, seed=1))
    assert restless > quiet
    assert restless == last_at(Unrest(0.3, 50, seed=1))
    assert restless != last_at(Unrest(0.3, 50, seed=2))

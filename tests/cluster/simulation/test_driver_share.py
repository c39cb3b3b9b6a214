"""With more drafters than the driver can read for, they draft less and the target does not wait."""

from __future__ import annotations

import pytest

from cluster.decoding.drafters import Drafters
from cluster.simulation.layout import HostCosts
from cluster.simulation.trial import course_of, figures_of
from tests.cluster.simulation.devices import layout, load, simulated


def _tokens_per_second(drafters: int) -> float:
    fleet = simulated(
        layout("fanout", window=8, drafters=drafters),
        load(requests=24, concurrency=12, tokens=40, acceptance=0.8),
        costs=HostCosts(),
    )
    assert fleet.same_text
    return figures_of([course_of(fleet)]).tokens_per_second


def test_four_drafters_are_not_much_slower_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are virtual, so they are the same on every host."""
    one, four = _tokens_per_second(1), _tokens_per_second(4)
    assert four > 0.95 * one
    # Negative control: without the bound, they take the driver's time from the target.
    monkeypatch.setattr(Drafters, "_crowd", lambda _, drafter: drafter.load)
    assert _tokens_per_second(4) < 0.8 * one

"""A drafter on the target's host: steps are longer while it computes, and only then."""

from __future__ import annotations

import pytest

from cluster.simulation.fleet import Fleet
from tests.cluster.simulation.devices import DRAFT_MS, STEP_MS, layout, load, simulated


def step_ms(fleet: Fleet) -> float:
    """Mean milliseconds of a step."""
    meter = fleet.targets[0].meter
    return 1000 * meter.busy_seconds / meter.passes


@pytest.mark.parametrize("beside", [1.0, 1.5, 2.5])
def test_steps_are_longer_while_the_drafter_computes(beside: float) -> None:
    asked = load(requests=2, concurrency=1, acceptance=0.9)
    apart = simulated(layout("chain", window=8), asked)
    shared = simulated(layout("chain", window=8), asked, shared_host=beside)
    assert step_ms(apart) == pytest.approx(STEP_MS)
    # In a step it drafts what is new. Of that time, a part adds nothing to the work of the step.
    passes = shared.drafters[0].meter.passes / shared.targets[0].meter.passes
    longer_ms = min(passes * DRAFT_MS, STEP_MS * beside) * (1 - 1 / beside)
    assert step_ms(shared) == pytest.approx(STEP_MS + longer_ms, rel=0.06)


def test_lockstep_drafts_between_steps() -> None:
    asked = load(requests=2, concurrency=1)
    shared = simulated(layout("lockstep"), asked, shared_host=2.5)
    # Only the drafter's first pass, while the prompt is computed, is beside a step.
    assert step_ms(shared) == pytest.approx(STEP_MS, rel=0.03)


def test_plain_decoding_is_as_on_a_host_of_its_own() -> None:
    asked = load(requests=2, concurrency=1)
    assert step_ms(simulated(layout("off"), asked, shared_host=2.5)) == pytest.approx(STEP_MS)

"""Policy `auto` where drafter and target share a host: steps are longer beside drafting.

Under the simulator, as test_auto.py. Each test names what went wrong without what it guards.
"""

from __future__ import annotations

from typing import Any

import pytest

from cluster.decoding.auto.choices import Pilot, drafting_choices
from cluster.decoding.events import Event, StepDone
from cluster.decoding.instructions import RunStep
from cluster.simulation.fleet import Fleet
from cluster.simulation.layout import Layout, Load
from tests.cluster.decoding.test_auto import DRAFTER, TARGET, choices, decode
from workers.emulated.latency_profiles import DeviceProfile, PassTimes
from workers.emulated.replay_proposer import ReplayProposer
from workers.emulated.replay_text import Guess


def test_plain_decoding_is_not_believed_as_slow_as_a_step_beside_drafting() -> None:
    """With one mean of both, plain decoding looked as slow as drafting and was never chosen."""
    given: dict[str, Any] = {"acceptance": 0.5, "tokens": 300, "drafter": DRAFTER.scaled(4)}
    plain, _ = decode("off", shared=2.5, **given)
    auto, fleet = decode("auto", window=32, shared=2.5, **given)
    chain, _ = decode("chain", window=4, shared=2.5, **given)
    assert chain < 0.8 * plain, "negative control: drafting does not pay"
    assert auto >= 0.88 * plain
    believed = fleet.drivers[0].scheduler.speculation().estimates
    assert believed["step_ms_per_drafting_ms"] == pytest.approx(1 - 1 / 2.5, abs=0.15)


@pytest.mark.parametrize("slower", [8, 30])
def test_six_at_once_with_a_slow_drafter_are_decided_for(slower: float) -> None:
    """It delivers too late to be verified, so no candidate is ever judged."""
    given: dict[str, Any] = {"acceptance": 0.7, "batch": 6, "tokens": 100, "shared": 1.5}
    plain, _ = decode("off", **given)
    auto, fleet = decode("auto", window=32, drafter=DRAFTER.scaled(slower), **given)
    assert choices(fleet)["off"] > 0.9 * choices(fleet).total()
    assert auto >= 0.9 * plain


@pytest.mark.parametrize(
    ("target", "drafter", "shared"), [(2, 20, 2.5), (3, 30, 1.5), (3, 40, None)]
)
def test_a_rest_ends_soon_after_the_noise_of_the_host(
    target: float, drafter: float, shared: float | None
) -> None:
    """All devices are slower for four seconds. Rest, then draft within 32 steps."""
    layout = Layout(TARGET, "auto", 32, drafter=DRAFTER, drafters=1, shared_host=shared)
    fleet = Fleet(layout, Load(1, 16, 500, Guess(0.9, 0.0, seed=1), concurrency=1))
    scheduler = fleet.drivers[0].scheduler
    proposer = fleet.drafters[0]._desk.proposer
    assert isinstance(proposer, ReplayProposer)
    fleet.targets[0]._pass_ms = TARGET.scaled(target).pass_ms
    proposer._profile = DRAFTER.scaled(drafter)
    ended_at: list[int] = []

    def end() -> None:
        fleet.targets[0]._pass_ms, proposer._profile = TARGET.pass_ms, DRAFTER
        ended_at.append(scheduler.totals.steps)

    fleet.clock.at(4.0, end)
    rested: list[bool] = []  # By step.
    steps_for = scheduler.steps_for

    def watched(event: Event) -> list[RunStep]:
        steps = steps_for(event)
        if steps:
            rested.append(all(one.policy.name == "off" for one in scheduler._state.running))
        return steps

    scheduler.steps_for = watched  # type: ignore[method-assign]
    fleet.run()
    assert fleet.same_text
    (ended,) = ended_at
    assert sum(rested[:ended]) > ended / 2, "negative control: it rested"
    assert sum(rested[ended + 32 :]) < 0.1 * len(rested[ended + 32 :])


def on_cores(profile: DeviceProfile, *points: tuple[int, float]) -> DeviceProfile:
    """`profile` with passes whose time depends on their tokens alone: (tokens, milliseconds)."""
    tokens, times = zip(*points, strict=True)
    table = PassTimes(batch=(1, 64), tokens=tokens, table=(times, times))
    return profile.model_copy(update={"pass_ms": table})


@pytest.mark.parametrize(
    ("batch", "shared", "acceptance"), [(1, 1.0, 0.75), (6, 1.0, 0.9), (6, 1.3, 0.9)]
)
def test_on_cores_the_drafter_must_read_each_prompt(
    batch: int, shared: float, acceptance: float
) -> None:
    """Times of the demo pair on an Intel host. A drafter reads one prompt after another, for steps.

    `auto` began plainly, so it had hardly read them when the requests ended, and took the passes
    that read for the time of any pass: .60 and .72 of the best with six at once.
    """
    target = on_cores(TARGET, (1, 42.0), (4, 56.0), (6, 62.0), (36, 105.0), (512, 820.0))
    drafter = on_cores(DRAFTER, (1, 9.0), (6, 16.0), (45, 150.0), (512, 1500.0))
    speeds: dict[str, float] = {}
    for policy, window in (("off", 1), ("chain", 4), ("lockstep", 4), ("auto", 32)):
        layout = Layout(target, policy, window, drafter=drafter, drafters=1, shared_host=shared)
        guess = Guess(acceptance, 0.3, seed=1)
        fleet = Fleet(layout, Load(6, 45, 64, guess, concurrency=batch))
        fleet.run()
        assert fleet.same_text
        speeds[policy] = fleet.committed / max(one.last_at for one in fleet.answered)
    assert speeds["chain"] > 1.3 * speeds["off"], "negative control: drafting pays"
    # With six at once whose steps drafting does not make longer it has .88: it tries branches
    # before it has seen what their passes take.
    share = 0.87 if (batch, shared) == (6, 1.0) else 0.9
    assert speeds["auto"] >= share * max(speeds.values())


def test_the_batch_is_all_that_decode_and_not_the_last_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In lockstep a part of the batch is verified while the rest drafts: each answer holds a part.

    `auto` took it for the batch, which seemed to grow and shrink, and chose anew at each step.
    """
    waiting = [one for one in drafting_choices() if one.policy.waits]
    monkeypatch.setattr("cluster.decoding.auto.chooser.drafting_choices", lambda: waiting)
    layout = Layout(TARGET, "auto", 4, drafter=DRAFTER, drafters=1, shared_host=2.5)
    fleet = Fleet(layout, Load(6, 16, 100, Guess(0.85, 0.0, seed=1), concurrency=6))
    auto = fleet.drivers[0].scheduler._state.auto
    seen: list[tuple[int, int]] = []  # Sequences in the step, and in the batch.
    answered = auto.answered

    def watched(event: StepDone, batch: list[Pilot], **counts: int) -> None:
        answered(event, batch, **counts)
        seen.append((auto.steps.last.sequences, len(batch)))

    monkeypatch.setattr(auto, "answered", watched)
    fleet.run()
    assert fleet.same_text
    whole = [batch for _, batch in seen].index(6)
    ended = max(place for place, (_, batch) in enumerate(seen) if batch == 6)
    assert any(0 < part < 6 for part, _ in seen[whole : ended + 1]), "negative control: in parts"
    assert {batch for _, batch in seen[whole : ended + 1]} == {6}


@pytest.mark.long
@pytest.mark.parametrize("slower", [1.0, 4.0])
@pytest.mark.parametrize("batch", [1, 6])
@pytest.mark.parametrize("shared", [1.0, 1.5, 2.5])
def test_short_requests_on_a_cold_server(slower: float, batch: int, shared: float) -> None:
    """Six of 64 tokens, against the best of the policies that are named most."""
    given: dict[str, Any] = {"batch": batch, "requests": 6, "tokens": 64, "acceptance": 0.6}
    given |= {"drafter": DRAFTER.scaled(slower), "shared": shared}
    fixed = [decode("off", **given)[0]]
    for policy in ("chain", "lockstep"):
        fixed += [decode(policy, window=window, **given)[0] for window in (2, 4, 8)]
    auto, _ = decode("auto", window=32, **given)
    assert auto >= 0.9 * max(fixed)

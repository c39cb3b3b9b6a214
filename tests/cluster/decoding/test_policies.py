"""The registered policies, the page that shows them, and one that another package adds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from cluster.decoding.events import Admitted, DrafterJoined
from cluster.decoding.policies.chain import Chain
from cluster.decoding.policy import POLICIES, DraftView, Needs, policy_named
from cluster.decoding.scheduler import Scheduler
from paceline.errors import ConfigError, InvalidRequestError
from tests.cluster.decoding.pretended_drafter import PretendedDrafter
from tests.cluster.decoding.scripts import PROMPT
from tests.cluster.decoding.true_text import request, true_token
from tests.cluster.decoding.world import World
from tests.recipes import recipes

ROOT = Path(__file__).resolve().parents[3]
RECIPE = recipes()["A lookahead policy"]

DECODES_UNDER_HALF = """
from tests.cluster.simulation.devices import layout, load, simulated
from cluster.decoding.policy import POLICIES

assert "half" in POLICIES, list(POLICIES)

def texts(fleet):
    return {one.request.sequence_id: one.token_ids for one in fleet.answered}

for acceptance in (0.9, 0.2):
    asked = load(acceptance=acceptance, temperature=1.0)
    half, chain, off = (
        simulated(layout(policy, window=8), asked) for policy in ("half", "chain", "off")
    )
    assert texts(half) == texts(chain) == texts(off)
    drafted = [fleet.drivers[0].scheduler.totals.counts.drafted for fleet in (half, chain)]
    print(acceptance, drafted[0] < 0.75 * drafted[1])
"""


def test_the_page_has_every_policy_as_it_is_registered() -> None:
    page = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    rows = [
        f"| `{one.name}` | {one.help} | {one.needs} | {f'{one.paper} ' if one.paper else ''}|"
        for one in POLICIES.all().values()
        if type(one).__module__.startswith("cluster.decoding.policies.")
    ]
    assert re.findall(r"(?m)^\| `\w+` \|.*$", page) == rows


def test_an_unknown_policy_is_refused_with_the_nearest_name() -> None:
    expected = "policy: expected one of auto, chain, .*, got 'chian'; did you mean chain"
    with pytest.raises(InvalidRequestError, match=expected):
        policy_named("chian")


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        (Needs(), "nothing"),
        (Needs(no_draft_probs=True, drafters=2), "the rule coupled or one-hot, 2 drafters"),
        (
            Needs(chains_only=True, shared_noise=True, groups=2),
            "the rule coupled, chains, 2 target groups",
        ),
    ],
)
def test_needs_are_told_in_words(needs: Needs, said: str) -> None:
    assert str(needs) == said


def test_a_package_adds_the_policy_of_the_recipe(tmp_path: Path) -> None:
    RECIPE.install(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", DECODES_UNDER_HALF],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split("\n")[:2] == ["0.9 False", "0.2 True"], done.stderr


class Broken(Chain):
    """It answers everything wrong, after a while."""

    name = "broken"
    place_in_auto = None
    answers: ClassVar[list[Any]] = []

    def granted_candidates(self, view: DraftView) -> Any:
        return self._answer()

    def window(self, view: DraftView, now: float, wait_seconds: float) -> Any:
        return self._answer()

    def _answer(self) -> Any:
        self.answers.append(None)
        match len(self.answers) % 5:
            case 0:
                raise ZeroDivisionError("injected")
            case 1:
                return 3.5
            case 2:
                return -1
            case 3:
                return 1 << 40
        return 4


def test_a_policy_that_fails_costs_only_its_own_sequences_their_speed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(POLICIES, "_entries", {**POLICIES.all(), "broken": Broken()})
    world = World(Scheduler(max_num_seqs=4))
    world.join_target()
    world.drafters["d"] = PretendedDrafter(true_token)
    world.send(DrafterJoined(0, "d", 1000))
    for sequence_id, policy in enumerate(("chain", "broken", "chain")):
        world.send(Admitted(0, request(sequence_id, PROMPT, policy=policy, max_tokens=30)))
    while len(world.finished) < 3:
        for _ in range(4):
            world.draft("d")
        world.answer()
    assert Broken.answers
    assert caplog.text.count("the policy 'broken' failed") == 1
    assert max(world.finished[one].stats.steps for one in (0, 2)) < 15


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"fans_out": True}, "fans_out needs"),
        ({"replicates": True}, "replicates needs"),
        ({"replicates": True, "needs": Needs(shared_noise=True)}, "replicates needs"),
    ],
)
def test_a_policy_whose_needs_are_too_few_is_refused(facts: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        type("Lacking", (Chain,), {"name": "lacking", **facts})

"""The registered policies, the page that shows them, and one that another package adds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.decoding.lookahead import POLICIES, Needs, policy_named
from paceline.errors import InvalidRequestError
from tests.recipes import recipes

ROOT = Path(__file__).resolve().parents[3]
RECIPE = recipes()["A lookahead policy"]

DECODES_UNDER_HALF = """
from tests.cluster.simulation.devices import layout, load, simulated
from cluster.decoding.lookahead import POLICIES

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

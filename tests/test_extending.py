"""The recipes of docs/extending*.md: their packages, installed, serve."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.recipes import Recipe, recipes

ROOT = Path(__file__).resolve().parent.parent
RECIPES = recipes()

REQUESTS: dict[str, dict[str, str]] = {"A drafter kind": {"drafter": "bigram"}}
"""What a request names of each recipe, by the recipe's heading."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process in which the packages are installed."""
    site = tmp_path_factory.mktemp("site")
    for recipe in RECIPES.values():
        recipe.install(site)
    return os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}


def test_each_recipe_with_a_package_is_tried() -> None:
    assert RECIPES.keys() == REQUESTS.keys()


def test_their_packages_serve_the_text_of_plain_decoding(environment: dict[str, str]) -> None:
    asked: list[dict[str, Any]] = [
        {"temperature": temperature, "seed": 7, **extra}
        for temperature in (0.0, 1.0)
        for extra in (
            {"policy": "off"},
            *({"policy": "lockstep"} | one for one in REQUESTS.values()),
        )
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.extended_system"],
        input=json.dumps(asked),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    per_temperature = 1 + len(REQUESTS)
    accepted = 0
    for first in range(0, len(asked), per_temperature):
        plain, *others = answers[first : first + per_temperature]
        assert plain[1] == 0
        for options, (token_ids, num_accepted) in zip(asked[first + 1 :], others, strict=False):
            assert token_ids == plain[0], options
            accepted += num_accepted
    assert accepted, "nothing that they proposed was accepted"


def test_recipes_are_found_by_their_headings(tmp_path: Path) -> None:
    page = tmp_path / "extending.md"
    block = '```python\n# Not a heading\nX = 1\n```\n```toml\n[project]\nname = "{}"\n```\n'
    page.write_text(f"# All\n```toml\na = 1\n```\n## One\n{block}## Two\ntext\n{block}")
    found = recipes([page])
    project = {"project": {"name": "{}"}}
    assert found == {
        name: Recipe(name, "# Not a heading\nX = 1\n", project) for name in ("One", "Two")
    }

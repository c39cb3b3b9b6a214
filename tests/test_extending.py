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

REQUESTS: dict[str, dict[str, str]] = {
    "A drafter kind": {"drafter": "bigram"},
    "A lookahead policy": {"policy": "half"},
    "A verification rule": {"rule": "kseq-fixed"},
}
"""What a request names of each recipe, by the recipe's heading."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process in which the packages are installed."""
    site = tmp_path_factory.mktemp("site")
    for recipe in RECIPES.values():
        recipe.install(site)
    return os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}


def test_each_recipe_with_a_package_is_tried() -> None:
    assert RECIPES
    assert RECIPES.keys() <= REQUESTS.keys()


def test_their_packages_serve_the_text_of_plain_decoding(environment: dict[str, str]) -> None:
    """Above temperature 0 a rule need not keep the text."""
    named = [{"policy": "lockstep"} | REQUESTS[heading] for heading in RECIPES]
    asked: list[dict[str, Any]] = []
    for temperature in (0.0, 1.0):
        keep_text = [one for one in named if not (temperature and "rule" in one)]
        asked += [
            {"temperature": temperature, "seed": 7, **one}
            for one in ({"policy": "off"}, *keep_text)
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
    plain: list[int] = []
    accepted = 0
    answers = json.loads(done.stdout.splitlines()[-1])
    for options, (token_ids, num_accepted) in zip(asked, answers, strict=True):
        if options["policy"] == "off":
            plain = token_ids
        assert token_ids == plain, options
        accepted += num_accepted
    assert accepted, "nothing that was drafted was accepted"


def test_recipes_are_found_by_their_headings(tmp_path: Path) -> None:
    page = tmp_path / "extending.md"
    block = '```python\n# Not a heading\nX = 1\n```\n```toml\n[project]\nname = "{}"\n```\n'
    page.write_text(f"# All\n```toml\na = 1\n```\n## One\n{block}## Two\ntext\n{block}")
    found = recipes([page])
    project = {"project": {"name": "{}"}}
    assert found == {
        name: Recipe(name, "# Not a heading\nX = 1\n", project) for name in ("One", "Two")
    }

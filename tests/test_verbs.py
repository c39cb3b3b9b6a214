"""One verb each: continuous integration, hooks and pages call the verbs of the Makefile."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parent.parent
_MAKEFILE = (_ROOT / "Makefile").read_text()
_VERBS = set(re.findall(r"(?m)^([a-z][\w-]*):", _MAKEFILE))
_OF_A_CHANGE = ["install", "tools", "lint", "test", "flaky", "test-vllm"]


def _called(page: str) -> list[str]:
    """The verbs after `make` at the start of a command, in order."""
    return re.findall(r"(?m)^(?: {4}|[\s-]*run: )?make ([\w-]+)", (_ROOT / page).read_text())


@pytest.mark.parametrize("page", [".ci/run", ".github/workflows/ci.yml"])
def test_every_change_passes_the_same_verbs(page: str) -> None:
    assert _called(page) == _OF_A_CHANGE


def test_the_readme_names_the_verbs_that_test() -> None:
    assert _called("README.md") == ["demo", "test"]


def test_the_makefile_has_each_verb_that_is_named() -> None:
    (line,) = re.findall(r"(?m)^ {4}make (.*\|.*)$", (_ROOT / "CONTRIBUTING.md").read_text())
    assert set(line.split(" | ")) == _VERBS
    assert set(_OF_A_CHANGE) < _VERBS


def test_hooks_run_the_tools_of_lint() -> None:
    (recipe,) = re.findall(r"(?m)^lint: install\n((?:\t.*\n)+)", _MAKEFILE)
    of_lint = {
        tuple(line.split()[:2]) for line in recipe.replace("$(BIN)", ".venv/bin").splitlines()
    }
    hooks = (_ROOT / ".pre-commit-config.yaml").read_text()
    of_hooks = {tuple(entry.split()[:2]) for entry in re.findall(r"entry: (.*)", hooks)}
    assert of_hooks == of_lint

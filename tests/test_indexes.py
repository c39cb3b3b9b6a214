"""Packages that say what is in which file name all their modules, and no others."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def named_in(docstring: str) -> set[str]:
    return set(re.findall(r"(?<![\w/])\w+\.py\b", docstring))


def docstring_of(package: Path) -> str:
    return ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or ""


@pytest.mark.parametrize("package", ["cluster/decoding", "workers/drafting", "workers/engine"])
def test_an_index_names_every_module(package: str) -> None:
    modules = {path.name for path in (ROOT / package).glob("*.py")} - {"__init__.py"}
    assert named_in(docstring_of(ROOT / package)) == modules


def test_names_are_found_wherever_they_stand() -> None:
    assert named_in("a.py, b_2.py   two; c.py: one more\nd.pyi") == {"a.py", "b_2.py", "c.py"}
    assert named_in("see other/e.py") == set(), "of another folder"

"""docs/architecture.md has every room, names files that exist, and draws the enforced arrows."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.floors import ARROWS, FLOORS

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_every_room_has_its_line_and_a_file_to_start_at() -> None:
    rows = re.findall(r"^\| `([\w/]+)` \| [^|`]*(?:`[^|]*)?\| ([^|]*) ?\|$", PAGE, re.MULTILINE)
    lines = {room: re.findall(r"`(\w+\.py)`", start) for room, start in rows}
    assert {room.replace("/", ".") for room in lines} == ARROWS.keys()
    assert [f"{room}/{name}" for room, names in lines.items() for name in names]
    for room, names in lines.items():
        for name in names:
            assert (ROOT / room / name).exists(), f"{room}/{name}"


def test_every_file_says_what_is_in_it() -> None:
    """The page sends readers to the first lines of docstrings."""
    silent = [
        str(path.relative_to(ROOT))
        for floor in FLOORS
        for path in (ROOT / floor).rglob("*.py")
        if "v1" not in path.parts
        and path.read_text(encoding="utf-8").strip()
        and not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert silent == []


def test_the_arrows_are_those_that_are_enforced() -> None:
    drawn = re.findall(r"^\| `([\w/]+)` \| ((?:`\w+`(?:, )?)+|nothing) \|$", PAGE, re.MULTILINE)
    arrows = {room.replace("/", "."): tuple(re.findall(r"`(\w+)`", names)) for room, names in drawn}
    assert arrows == ARROWS

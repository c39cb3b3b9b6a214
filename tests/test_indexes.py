"""docs/architecture.md names every product file once, and its arrows are the enforced ones."""

from __future__ import annotations

import re
from pathlib import Path

from tests.floors import ARROWS, FLOORS

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_every_file_has_its_line() -> None:
    named: list[str] = []
    room = ""
    for line in PAGE.splitlines():
        if heading := re.match(r"#+ `([\w/]+)/`", line):
            room = heading[1]
        elif row := re.match(r"\| `(\w+\.py)` \| .", line):
            named.append(f"{room}/{row[1]}")
    there = {
        str(path.relative_to(ROOT))
        for floor in FLOORS
        for path in (ROOT / floor).rglob("*.py")
        if path.name != "__init__.py" and "v1" not in path.parts
    }
    assert sorted(named) == sorted(there)


def test_the_arrows_are_those_that_are_enforced() -> None:
    drawn = re.findall(r"^\| `([\w/]+)` \| ((?:`\w+`(?:, )?)+|nothing) \|$", PAGE, re.MULTILINE)
    arrows = {room.replace("/", "."): tuple(re.findall(r"`(\w+)`", names)) for room, names in drawn}
    assert arrows == ARROWS

"""The packages of the recipes in docs/extending*.md, built from the pages themselves.

A recipe is a section with a `toml` block, the package's pyproject.toml, and a `python` block, the
module that its entry point names.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DOCS = Path(__file__).resolve().parent.parent / "docs"
_PARTS = re.compile(r"^```(\w*)\n(.*?)^```$|^#+ ([^\n]+)$", re.MULTILINE | re.DOTALL)
"""A fenced block, or a heading outside of blocks."""


@dataclass(frozen=True)
class Recipe:
    """A section of a page. `source`: its Python module. `project`: its pyproject.toml, read."""

    heading: str
    source: str
    project: dict[str, Any]

    @property
    def entry_points(self) -> dict[str, dict[str, str]]:
        """Per group, the module that each name stands for."""
        groups: dict[str, dict[str, str]] = self.project["project"]["entry-points"]
        return groups

    @property
    def module(self) -> str:
        (name,) = {module for points in self.entry_points.values() for module in points.values()}
        return name

    def install(self, site: Path) -> None:
        """Put the package into `site`, as pip would put it into site-packages."""
        project = self.project["project"]
        (site / f"{self.module}.py").write_text(self.source)
        info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        )
        lines = [
            line
            for group, points in self.entry_points.items()
            for line in (f"[{group}]", *(f"{name} = {module}" for name, module in points.items()))
        ]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def _sections(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Each heading of a page, and the blocks below it by language."""
    heading, blocks = "", dict[str, str]()
    for language, block, next_heading in _PARTS.findall(text):
        if next_heading:
            yield heading, blocks
            heading, blocks = next_heading, {}
        else:
            blocks[language] = block
    yield heading, blocks


def recipes(pages: Iterable[Path] | None = None) -> dict[str, Recipe]:
    """The recipes with a package, by heading. `pages` None: docs/extending*.md."""
    return {
        heading: Recipe(heading, blocks["python"], tomllib.loads(blocks["toml"]))
        for page in (sorted(_DOCS.glob("extending*.md")) if pages is None else pages)
        for heading, blocks in _sections(page.read_text(encoding="utf-8"))
        if {"python", "toml"} <= blocks.keys()
    }

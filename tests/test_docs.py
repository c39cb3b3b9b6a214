"""Links lead somewhere, generated pages and pictures are current."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from scripts import draw_policies, generate_docs

_ROOT = Path(__file__).resolve().parent.parent
_PAGES = sorted([*_ROOT.glob("*.md"), *(_ROOT / "docs").rglob("*.md")])
_LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")
_FILE = re.compile(r"`([\w./-]+\.py)`")
_NAMED_IN_CODE = re.compile(r"\bdocs/[\w/-]+\.md\b")


def _anchors(page: Path) -> set[str]:
    """The anchors of the headings of `page`, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.*)$", page.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _broken(page: Path) -> list[str]:
    """The links of `page` that lead nowhere."""
    broken = []
    for link in _LINK.findall(page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(_ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert _broken(page) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Some `title`\n[a](#some-title) [b](#other) [c](absent.md) [d](page.md)\n")
    assert _broken(page) == ["#other", "absent.md"]


def test_files_that_pages_name_exist() -> None:
    """A page may name a file by its path, or by the end of it."""
    folders = ("cluster", "deploy", "paceline", "paceline_vllm", "workers", "scripts", "tests")
    files = [path.parts for name in folders for path in (_ROOT / name).rglob("*.py")]
    ends = {"/".join(parts[-n:]) for parts in files for n in range(1, 6)}
    named = {
        (str(page.relative_to(_ROOT)), file)
        for page in _PAGES
        if page.name not in {"CHANGELOG.md", "extending.md"}  # names of the past, and examples
        for file in _FILE.findall(page.read_text())
    }
    assert named
    assert sorted(pair for pair in named if pair[1] not in ends) == []


def test_pages_that_the_code_names_exist() -> None:
    folders = ("cluster", "deploy", "paceline", "proto", "workers", "scripts", "k8s")
    sources = [p for name in folders for p in (_ROOT / name).rglob("*") if p.is_file()]
    named = {
        (page, str(source.relative_to(_ROOT)))
        for source in sources
        if source.suffix in {".py", ".proto", ".sh", ".yaml", ".toml"}
        for page in _NAMED_IN_CODE.findall(source.read_text())
    }
    assert named
    assert sorted(pair for pair in named if not (_ROOT / pair[0]).exists()) == []


@pytest.mark.parametrize("name", generate_docs.PAGES)
def test_a_generated_page_is_current(name: str) -> None:
    """Else run `python scripts/generate_docs.py`."""
    assert (_ROOT / "docs" / name).read_text(encoding="utf-8") == generate_docs.PAGES[name]()


@pytest.mark.parametrize("scheme", draw_policies.SCHEMES)
def test_a_picture_shows_the_committed_trace(scheme: str) -> None:
    """Else run `python scripts/draw_policies.py --draw`."""
    trace = json.loads(draw_policies.TRACE.read_text(encoding="utf-8"))
    assert trace["emulated"]
    drawn = draw_policies.picture(trace, scheme)
    assert "EMULATED" in drawn
    path = draw_policies.PICTURES / f"policies-{scheme}.svg"
    assert path.read_text(encoding="utf-8") == drawn

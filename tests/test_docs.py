"""Pages: links lead somewhere, blocks are right, generated ones are current, all stay short."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

from cluster.config.load import load_config
from deploy.cli.app import build_app
from scripts import draw_policies, generate_docs

_ROOT = Path(__file__).resolve().parent.parent
_PAGES = sorted([*_ROOT.glob("*.md"), *(_ROOT / "docs").rglob("*.md")])
_LINK = re.compile(r"(?:\]\(|src=\"|srcset=\")(?!https?:)([^)\"\s]+)[)\"]")
_FILE = re.compile(r"`([\w./-]+\.py)`")
_NAMED_IN_CODE = re.compile(r"\bdocs/[\w/-]+\.md\b")
_FENCED = re.compile(r"(?ms)^( *)```(\w*)\n(.*?)^\1```$")
_INDENTED = re.compile(r"(?m)(?<=\n\n)(?:(?: {4}.*|)\n)+")
MOST_WORDS = 40_000
"""Upper bound on the words of README.md and docs/ together, generated pages not counted."""


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
    page.write_text(
        '# Some `title`\n[a](#some-title) [b](#other) [c](absent.md) [d](page.md) <p src="e.svg">\n'
    )
    assert _broken(page) == ["#other", "absent.md", "e.svg"]


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


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """The language and the text of each block of code. Indented blocks have no language."""
    for _, language, block in _FENCED.findall(text):
        yield language, textwrap.dedent(block)
    for block in _INDENTED.findall(_FENCED.sub("", text)):
        yield "", textwrap.dedent(block)


def _commands(block: str) -> Iterator[list[str]]:
    """The words after `paceline` of each command in a block of shell."""
    for line in block.replace("\\\n", " ").splitlines():
        if found := re.match(r"(?:sudo )?(?:[A-Z_]+=\S+ )*(?:chrt -f 5 )?paceline ([a-z].*)", line):
            command = re.split(r"\s{2,}#|\s{3,}(?=[a-z])| \|", found[1])[0]
            yield shlex.split(command, comments=True)


@cache
def _flags() -> dict[str, set[str]]:
    """The flags of each command."""
    root: Any = typer.main.get_command(build_app({}))
    context = root.context_class(root, info_name="paceline")
    return {
        inner.command_path.removeprefix("paceline "): {
            name for one in command.get_params(inner) for name in (*one.opts, *one.secondary_opts)
        }
        for command, inner in generate_docs.commands(root, context)
    }


def _wrong(words: list[str]) -> list[str]:
    """What a command has that `paceline` does not."""
    name = next((" ".join(words[:n]) for n in (2, 1) if " ".join(words[:n]) in _flags()), None)
    if name is None:
        return words[:1]
    given = {word.partition("=")[0] for word in words if word.startswith("--")}
    return sorted(given - _flags()[name] - {"--help"})


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(_ROOT)))
def test_blocks_are_right(page: Path, tmp_path: Path) -> None:
    """Commands and flags exist, configurations load, Python and JSON can be read."""
    wrong: list[object] = []
    for language, block in _blocks(page.read_text(encoding="utf-8")):
        wrong += [(words, bad) for words in _commands(block) if (bad := _wrong(words))]
        if language == "python":
            compile(block, str(page), "exec")
        if language == "json":
            json.loads(block)
        is_ours = re.match(
            r"(# .*\n)?\[+(target|drafters|pool|speculation|server|workers)\]", block
        )
        if language == "toml" and "[project]" in block:
            tomllib.loads(block)
        elif page.name != "extending.md" and (language == "toml" or (not language and is_ours)):
            path = tmp_path / "paceline.toml"
            path.write_text(block, encoding="utf-8")
            load_config(path, {})
    assert wrong == []


def test_wrong_blocks_are_found() -> None:
    page = "text\n\n    paceline up --no-such  # a comment\n\n```sh\npaceline nothing\n```\n"
    found = [_wrong(words) for _, block in _blocks(page) for words in _commands(block)]
    assert found == [["nothing"], ["--no-such"]]


def test_the_pages_can_be_read() -> None:
    pages = [_ROOT / "README.md", *(_ROOT / "docs").rglob("*.md")]
    words = {
        path.name: len(path.read_text(encoding="utf-8").split())
        for path in pages
        if path.name not in generate_docs.PAGES
    }
    assert sum(words.values()) <= MOST_WORDS, words

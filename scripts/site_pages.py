"""A hook of mkdocs (mkdocs.yml): pages of the site that are not in docs/, and links out of docs/.

README.md, CONTRIBUTING.md, SECURITY.md and CHANGELOG.md become pages, and so does the client's API.
A link to another file of the repository becomes its name, since the site has no source.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
AT_THE_ROOT = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages by their path in the repository, and their names on the site."""
API = ("client", "options", "generation", "errors")
"""Modules of `paceline` that a caller uses."""
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside docs/."""
    for path, name in AT_THE_ROOT.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        # Attributes of HTML, which mkdocs leaves as they are.
        text = re.sub(r'(src|srcset)="docs/', r'\1="', text)
        files.append(File.generated(config, name, content=_relinked(text, ROOT)))
    parts = "\n\n".join(f"::: paceline.{name}" for name in API)
    files.append(File.generated(config, "api.md", content=f"# The client's API\n\n{parts}\n"))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Resolve links out of docs/, and indent what belongs to a number of a list as mkdocs wants."""
    if page.file.src_path not in AT_THE_ROOT.values():
        markdown = _relinked(markdown, ROOT / "docs")
    return re.sub(r"(?m)^ {3}(?=\S)", "    ", markdown)


def _relinked(text: str, folder: Path) -> str:
    """The text of a page of `folder`, with links as the site has them."""

    def resolve(match: re.Match[str]) -> str:
        name, (path, _, anchor) = match[1], match[2].partition("#")
        target = (folder / path).resolve().relative_to(ROOT).as_posix()
        if target.startswith("docs/"):
            target = target.removeprefix("docs/")
        elif target in AT_THE_ROOT:
            target = AT_THE_ROOT[target]
        else:
            return name
        return f"[{name}]({target}{'#' + anchor if anchor else ''})"

    return _LINK.sub(resolve, text)

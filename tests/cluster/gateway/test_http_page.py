"""docs/http.md names every field that the gateway knows."""

from __future__ import annotations

import re
from pathlib import Path

from cluster.gateway.requests import FIELDS, REFUSED, SPECULATION

PAGE = Path(__file__).resolve().parents[3] / "docs" / "http.md"


def test_the_page_names_every_field() -> None:
    named = set(re.findall(r"`(\w+)`", PAGE.read_text(encoding="utf-8")))
    assert {*FIELDS, *REFUSED["chat"], *REFUSED["completion"], *SPECULATION} - named == set()

"""A Python that has none of our packages."""

from __future__ import annotations

import venv
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def empty_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder, symlinks=True)
    return folder / "bin" / "python"

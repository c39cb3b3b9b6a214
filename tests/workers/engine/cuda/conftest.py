"""Fixtures of several tests of kernels."""

from __future__ import annotations

import pytest

from tests.workers.engine.trees import multiply_row_by_row


@pytest.fixture
def products_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply_row_by_row(monkeypatch)

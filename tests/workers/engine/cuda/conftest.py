"""Fixtures of several tests of kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


@pytest.fixture
def products_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies as numpy does, where a row's bits depend on its place."""

    def multiply(left: Any, right: Any, dtype: Any) -> Any:
        products = left.astype(dtype)[:, None, :] * right.astype(dtype).T[None, :, :]
        return np.ascontiguousarray(products).sum(axis=-1)

    monkeypatch.setattr(np, "matmul", multiply)

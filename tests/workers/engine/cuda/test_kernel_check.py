"""The check of our kernels at start-up passes, and finds a kernel that is wrong."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from workers.engine.cuda import kernel_check
from workers.engine.cuda.kernel_check import ModelSizes, find_fault
from workers.verification.device_choice import choose_by_torch

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="there is a GPU: the engine's tests check"
    ),
    pytest.mark.usefixtures("products_row_by_row"),
]
CPU = torch.device("cpu")
SIZES = ModelSizes(
    num_queries=2,
    num_keys=1,
    head_size=16,
    hidden=32,
    vocab_size=500,
    dtype=torch.float32,
    kv_dtype=torch.float32,
)


def found() -> str | None:
    # The interpreter's numpy would warn of what a GPU does silently.
    with np.errstate(over="ignore", invalid="ignore"):
        return find_fault(CPU, SIZES)


def test_right_kernels_pass() -> None:
    assert found() is None


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("add_and_norm", "add_and_norm differs by"),
        ("gate", "gate differs by nan"),
        ("choose_by_kernels", "the choice of tokens differs"),
        ("attend_paths", "attention of a tree has other bits"),
    ],
)
def test_a_wrong_kernel_is_found(name: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right: Any = getattr(kernel_check, name)

    def wrong(*args: Any, **options: Any) -> Any:
        result = right(*args, **options)
        if isinstance(result, Tensor):
            return result * (torch.nan if name == "gate" else 1.001)
        return (result[0] + 1, result[1])

    monkeypatch.setattr(kernel_check, name, wrong)
    assert (found() or "").startswith(fault)


def test_attention_that_runs_elsewhere_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_check, "attend_pages", None)
    monkeypatch.setattr(kernel_check, "choose_by_kernels", choose_by_torch)
    sizes = ModelSizes(2, 1, 16, 32, 500, torch.float32, torch.float32, with_attention=False)
    assert find_fault(CPU, sizes) is None

"""Our own GPU kernels run where they are asked for, and on GPUs alone."""

from __future__ import annotations

import pytest
import torch

from workers.kernels import ASKED, can_run_kernels, on_device


def test_kernels_that_no_gpu_has_run_must_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("0", "yes"):
        monkeypatch.setenv(ASKED, value)
        assert not can_run_kernels(torch.device("cuda"))
    monkeypatch.delenv(ASKED)
    assert not can_run_kernels(torch.device("cuda"))


def test_they_are_no_matter_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ASKED, "1")
    assert not can_run_kernels(torch.device("cpu"))


@pytest.mark.gpu
def test_a_gpu_with_a_compiler_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ASKED, "1")
    assert can_run_kernels(torch.device("cuda"))


def test_on_a_cpu_there_is_no_device_to_launch_on() -> None:
    with on_device(torch.device("cpu")), on_device(torch.device("meta")):
        pass


@pytest.mark.gpu
def test_kernels_are_launched_on_the_device_of_their_tensors() -> None:
    """Of several, the last; the current device is the first before and after."""
    last = torch.cuda.device_count() - 1
    with on_device(torch.device("cuda", last)):
        assert torch.cuda.current_device() == last
    assert torch.cuda.current_device() == 0

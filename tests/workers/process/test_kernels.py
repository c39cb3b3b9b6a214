"""Our own GPU kernels run only where they are requested, and only on GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.tiny import make_tiny_checkpoint
from workers.drafting.kind import DrafterOptions
from workers.drafting.kinds.model import load_model_proposer
from workers.process import kernels
from workers.process.kernels import can_run_kernels, on_device, use_kernels
from workers.target.shard import TargetShardOptions, load_target


@pytest.fixture(autouse=True)
def wanted_as_before() -> Iterator[None]:
    before = kernels._wanted
    yield
    use_kernels(before)


def test_kernels_that_no_gpu_has_run_must_be_asked_for() -> None:
    use_kernels(False)
    assert not can_run_kernels(torch.device("cuda"))


async def test_a_worker_is_told_by_its_options(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    for wanted in (True, False):
        use_kernels(False)
        await load_target(TargetShardOptions(folder=folder, kernels=wanted))
        assert kernels._wanted is wanted
        use_kernels(False)
        await load_model_proposer(DrafterOptions("model", folder, kernels=wanted))
        assert kernels._wanted is wanted


def test_they_are_no_matter_of_a_cpu() -> None:
    use_kernels(True)
    assert not can_run_kernels(torch.device("cpu"))


@pytest.mark.gpu
def test_a_gpu_with_a_compiler_can() -> None:
    use_kernels(True)
    assert can_run_kernels(torch.device("cuda"))


def test_on_a_cpu_there_is_no_device_to_launch_on() -> None:
    with on_device(torch.device("cpu")), on_device(torch.device("meta")):
        pass


@pytest.mark.gpu
def test_kernels_are_launched_on_the_device_of_their_tensors() -> None:
    """They run on the last of several devices. The current device stays the first."""
    last = torch.cuda.device_count() - 1
    with on_device(torch.device("cuda", last)):
        assert torch.cuda.current_device() == last
    assert torch.cuda.current_device() == 0

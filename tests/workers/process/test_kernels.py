"""Our own GPU kernels run only on GPUs, where a check passes, unless they are forbidden."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from paceline.errors import ConfigError
from tests.tiny import make_tiny_checkpoint
from workers.drafting.kind import DrafterOptions
from workers.drafting.kinds.model import load_model_proposer
from workers.engine.options import UseKernels
from workers.process import kernels
from workers.process.kernels import can_run_kernels, check_kernels, on_device, use_kernels
from workers.target.shard import TargetShardOptions, load_target

GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def wanted_as_before() -> Iterator[None]:
    before = kernels._wanted
    yield
    use_kernels(before)


@pytest.fixture
def gpu_without_obstacles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_obstacle", lambda _: None)
    monkeypatch.setattr(kernels, "_failed", set())


def broken() -> str | None:
    raise RuntimeError("a kernel needs more shared memory")


def test_forbidden_kernels_do_not_run() -> None:
    use_kernels(False)
    assert not can_run_kernels(GPU)
    check_kernels(GPU, broken)


@pytest.mark.usefixtures("gpu_without_obstacles")
def test_they_run_where_the_check_passes(caplog: pytest.LogCaptureFixture) -> None:
    use_kernels("auto")
    with caplog.at_level(logging.INFO):
        check_kernels(GPU, lambda: None)
    assert can_run_kernels(GPU)
    (line,) = caplog.messages
    assert "agree with torch" in line


@pytest.mark.usefixtures("gpu_without_obstacles")
@pytest.mark.parametrize("find_fault", [broken, lambda: "attention differs by 0.3"])
def test_where_the_check_fails_torch_takes_their_place(
    find_fault: Callable[[], str | None], caplog: pytest.LogCaptureFixture
) -> None:
    use_kernels("auto")
    check_kernels(GPU, find_fault)
    assert not can_run_kernels(GPU)
    (line,) = caplog.messages
    assert "torch's take their place" in line
    assert "shared memory" in line or "0.3" in line


@pytest.mark.usefixtures("gpu_without_obstacles")
def test_required_kernels_must_pass_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(True)
    with pytest.raises(ConfigError, match=r"kernels = true.*shared memory.*auto or false"):
        check_kernels(GPU, broken)
    monkeypatch.setattr(kernels, "_obstacle", lambda _: "Triton is not installed")
    with pytest.raises(ConfigError, match="cannot run here: Triton is not installed"):
        check_kernels(GPU, lambda: None)


async def test_a_worker_is_told_by_its_options(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    choices: tuple[UseKernels, ...] = ("auto", True, False)
    for wanted in choices:
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

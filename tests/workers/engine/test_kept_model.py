"""Models kept as our CPU kernels read them: the same bits, no code of transformers, bad files."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import Architecture, make_tiny_checkpoint
from workers.engine.cpu import kept_model, native
from workers.engine.cpu.engine import CpuEngine
from workers.engine.load.model import load_on_cpu
from workers.engine.options import WeightForm
from workers.engine.slices import Slice

pytestmark = pytest.mark.skipif(
    native.kernels() is None, reason="this processor or this machine cannot run the kernels"
)
SIZES: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32}
PROMPT = Slice([0], 0, [3 + token % 50 for token in range(100)], 100)
LOADED = """
import sys
from pathlib import Path
from workers.engine.open import open_engine
open_engine(Path(sys.argv[1]), weights="float32", threads=1, kv_memory_bytes=1 << 20, device="cpu",
    cache=Path(sys.argv[2]))
print("transformers" in sys.modules)
"""


@pytest.fixture(autouse=True)
def keep_thread_count() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_checkpoint(tmp_path / "model", **SIZES)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "packed"


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The checkpoints that are read, in order."""
    read: list[Path] = []

    def counted(folder: Path, *arguments: Any, **options: Any) -> Any:
        read.append(folder)
        return load_on_cpu(folder, *arguments, **options)

    monkeypatch.setattr("workers.engine.cpu.engine.load_on_cpu", counted)
    return read


def logits(folder: Path, cache: Path | None, form: WeightForm = "float32") -> Tensor:
    engine = CpuEngine(folder, weights=form, threads=1, kv_memory_bytes=1 << 20, cache=cache)
    return engine.step([PROMPT])


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen2"])
def test_a_kept_model_has_the_bits_of_a_loaded_one(
    tmp_path: Path, cache: Path, loads: list[Path], form: WeightForm, architecture: Architecture
) -> None:
    folder = make_tiny_checkpoint(tmp_path / "model", architecture=architecture, **SIZES)
    expected = logits(folder, None, form)
    first, second = logits(folder, cache, form), logits(folder, cache, form)
    assert len(loads) == 2  # without a cache, and the first start with one
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)


def test_it_needs_none_of_transformers(folder: Path, cache: Path) -> None:
    said = [
        subprocess.run(
            [sys.executable, "-c", LOADED, str(folder), str(cache)],
            check=True, capture_output=True, text=True, timeout=120,
        ).stdout.strip()
        for _ in range(2)
    ]  # fmt: skip
    assert said == ["True", "False"]


def test_another_model_under_the_same_name_is_loaded(
    tmp_path: Path, folder: Path, cache: Path, loads: list[Path]
) -> None:
    old = logits(folder, cache)
    shutil.rmtree(folder)
    assert make_tiny_checkpoint(tmp_path / "model", seed=1, **SIZES) == folder
    new = logits(folder, cache)
    assert not torch.equal(new, old)
    assert torch.equal(new, logits(folder, None))
    assert torch.equal(new, logits(folder, cache))
    assert len(loads) == 3
    assert len(list(cache.iterdir())) == 1


def test_weights_that_were_replaced_in_place_are_loaded(
    folder: Path, cache: Path, loads: list[Path]
) -> None:
    logits(folder, cache)
    (folder / "model.safetensors").touch()
    logits(folder, cache)
    assert len(loads) == 2


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 100)


def cut_in_the_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(100)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def garble(path: Path) -> None:
    """Zero the weights of the layers: a sector that was not written, for example."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size - size // 3)
        file.write(b"\0" * (size // 6))


@pytest.mark.parametrize("damage", [truncate, cut_in_the_header, empty, garble])
def test_a_damaged_file_is_written_anew(
    folder: Path,
    cache: Path,
    loads: list[Path],
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
) -> None:
    expected = logits(folder, cache)
    (path,) = cache.iterdir()
    damage(path)
    assert torch.equal(logits(folder, cache), expected)
    (line,) = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert str(path) in line
    assert line.endswith("it is written anew")
    assert torch.equal(logits(folder, cache), expected)
    assert len(loads) == 2


def test_a_folder_that_cannot_be_written_costs_time_only(
    folder: Path, cache: Path, loads: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text("a file in its place")
    assert torch.equal(logits(folder, cache), logits(folder, None))
    (line,) = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert str(cache) in line
    assert line.endswith("(File exists): each start packs it again")


def test_a_full_disk_costs_time_only(
    folder: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(kept_model, "free_bytes", lambda path: 1000)
    logits(folder, cache)
    (line,) = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert "1000 bytes are free" in line
    assert list(cache.iterdir()) == []

"""Memory that the host does not have is refused before it is allocated, with the numbers."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from tests.tiny import make_tiny_checkpoint
from workers.engine.cpu.engine import CpuEngine
from workers.engine.load.stored_files import WEIGHTS
from workers.engine.memory import available_bytes


def test_what_is_left_is_less_than_there_is() -> None:
    available = available_bytes()
    assert 0 < available < total_bytes()


def test_kv_that_no_host_holds_is_refused(tmp_path: Path) -> None:
    """It is refused before the weights are read, which may take minutes."""
    folder = make_tiny_checkpoint(tmp_path)
    read: list[int] = []
    refused = r"float32 \(\d+ bytes\) and its KV together take \d{15,} bytes, but this host has"
    with pytest.raises(ConfigError, match=refused):
        CpuEngine(
            folder,
            threads=1,
            kv_memory_bytes=1 << 50,
            progress=lambda done, _: read.append(done),
        )
    assert not read


def test_weights_that_no_host_holds_are_refused(tmp_path: Path) -> None:
    """A sparse file: 0.75 of the host's memory by its header, almost nothing on the disk.

    It is in bfloat16, so in float32 it takes 1.5 times the memory.
    """
    folder = make_tiny_checkpoint(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    num_matrices = 3 * config["num_hidden_layers"]
    width = int(0.75 * total_bytes()) // (2 * num_matrices * config["hidden_size"])
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": width}))
    enlarge_feed_forward(folder / WEIGHTS, width, hidden_size=config["hidden_size"])
    with pytest.raises(ConfigError, match=r"weights as float32 take \d{9,} bytes, but this host"):
        CpuEngine(folder, threads=1, kv_memory_bytes=1 << 20)


def total_bytes() -> int:
    return int(Path("/proc/meminfo").read_text().split()[1]) * 1024


def enlarge_feed_forward(path: Path, width: int, *, hidden_size: int) -> None:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    end = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if ".mlp." in name:
            down = "down_proj" in name
            entry["shape"] = [hidden_size, width] if down else [width, hidden_size]
            entry["dtype"] = "BF16"
        size = 2 if entry["dtype"] == "BF16" else 4
        for dimension in entry["shape"]:
            size *= dimension
        entry["data_offsets"] = [end, end + size]
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)

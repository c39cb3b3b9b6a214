"""Servers that all tests share. They are started together, since each imports for half a minute."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.tiny import make_tiny_checkpoint
from tests.vllm.servers import ROOT, DrafterProcess, VllmServer, free_port

SMALL_KV = (
    *("--max-model-len", "192", "--max-num-seqs", "32", "--max-num-batched-tokens", "128"),
    *("--block-size", "32", "--num-gpu-blocks-override", "48"),
)
"""KV for 1,536 tokens: 32 requests of 100 tokens do not fit, so vLLM preempts; and long prompts are
read in chunks."""


@dataclass
class World:
    """vLLM without speculation, with our drafter, and with it on two tensor-parallel ranks."""

    folder: Path
    logs: Path
    drafter: DrafterProcess
    plain: VllmServer
    ours: VllmServer
    ranks: VllmServer


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    logs = tmp_path_factory.mktemp("logs")
    folder = make_tiny_checkpoint(
        tmp_path_factory.mktemp("tiny") / "model",
        hidden_size=512,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        intermediate_size=256,
        initializer_range=0.08,
    )
    port = free_port()
    drafter = DrafterProcess(folder, logs / "drafter", port)
    # Two ranks leave the drafter no core, so vLLM waits for it.
    two_ranks = {
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "PACELINE_SPECULATION__POLICY": "lockstep",
        "PACELINE_SPECULATION__WAIT_MS": "1000",
    }
    servers = [
        VllmServer(folder, logs / "plain", *SMALL_KV),
        # Beside it, branches would take the little that the drafter gets of the cores.
        VllmServer(
            folder, logs / "ours", *SMALL_KV,
            drafters=[port], environ={"PACELINE_SPECULATION__POLICY": "chain"},
        ),
        VllmServer(
            folder, logs / "ranks", *SMALL_KV, "--tensor-parallel-size", "2",
            drafters=[port], environ=two_ranks,
        ),
    ]  # fmt: skip
    try:
        drafter.wait()
        plain, ours, ranks = [server.wait() for server in servers]
        yield World(folder, logs, drafter, plain, ours, ranks)
    finally:
        for process in (*servers, drafter):
            process.stop()


def random_prompts(count: int, seed: int, longest: int = 120) -> list[list[int]]:
    """Prompts of token ids of the tiny tokenizer, of 1 to `longest` tokens."""
    source = random.Random(seed)
    return [
        [source.randrange(3, 384) for _ in range(source.randrange(1, longest))]
        for _ in range(count)
    ]


@pytest.fixture(scope="session")
def installation(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What pip would install here for our wheels, built from a copy of this tree.

    Without an index it fails if anything is missing that they need.
    """
    folder = tmp_path_factory.mktemp("wheels")
    for name in ("paceline", "paceline_vllm", "cluster", "workers", "paceline-vllm"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--isolated"]
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run(
        [*pip, "wheel", "-q", "--no-deps", "-w", "out", ".", "./paceline-vllm"],
        cwd=folder, check=True, env=environ,
    )  # fmt: skip
    wheels = [str(path) for path in (folder / "out").iterdir()]
    done = subprocess.run(
        [*pip, "install", "-q", "--dry-run", "--no-index", "--report", "-", *wheels],
        cwd=folder, check=True, env=environ, capture_output=True, text=True,
    )  # fmt: skip
    return [one["metadata"]["name"] for one in json.loads(done.stdout)["install"]]

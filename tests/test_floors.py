"""DESIGN.md section 1: no import climbs, and the pure rooms stay pure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.floors import FLOORS, imports_of, violations

ROOT = Path(__file__).resolve().parent.parent


def test_no_import_breaks_the_rules() -> None:
    read = {found.module.partition(".")[0] for found in imports_of(ROOT)}
    assert read == set(FLOORS), "every floor has modules, and they were read"
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("paceline/client.py", "import torch"),
        ("paceline/client.py", "def late():\n    from ray import get"),
        ("paceline/client.py", "from workers.engine import engine"),
        ("workers/drafter.py", "import cluster.driver"),
        ("workers/drafter.py", "import ray.util"),
        ("workers/verification/coupled.py", "import time"),
        ("workers/verification/coupled.py", "from random import random"),
        ("cluster/decoding/sequence.py", "import asyncio"),
        ("cluster/decoding/sequence.py", "from google import protobuf"),
        ("cluster/decoding/sequence.py", "from google.protobuf.message import Message"),
        ("cluster/decoding/sequence.py", "from paceline.v1 import types_pb2"),
        ("cluster/decoding/sequence.py", "from paceline import v1"),
        ("cluster/decoding/sequence.py", "import torch.nn"),
        ("cluster/decoding/sequence.py", "if TYPE_CHECKING:\n    import transformers"),
        ("cluster/decoding/sequence.py", "from ... import deploy"),
        ("cluster/driver.py", "from ..deploy import cli"),
        ("cluster/driver.py", "import importlib\nimportlib.import_module('deploy.cli')"),
        ("cluster/driver.py", "import_module(name)"),
        ("cluster/driver.py", "import_module(f'deploy.commands.{name}')"),
        ("cluster/driver.py", "import_module(f'dep{name}')"),
        ("cluster/driver.py", "__import__('deploy')"),
        ("deploy/cli.py", "import tests.tiny"),
    ],
)
def test_a_module_that_breaks_a_rule_is_reported(tmp_path: Path, module: str, source: str) -> None:
    path = tmp_path / module
    path.parent.mkdir(parents=True)
    path.write_text(source)
    [complaint] = violations(tmp_path)
    assert complaint.startswith(module.removesuffix(".py").replace("/", "."))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("deploy/cli.py", "import ray, torch, cluster.driver, workers.drafter, paceline.errors"),
        ("deploy/cli.py", "import_module(f'deploy.commands.{name}')"),
        ("cluster/driver.py", "import asyncio\nfrom . import decoding\nfrom paceline.v1 import x"),
        ("workers/verification/coupled.py", "import torch\nfrom ..engine import engine"),
        ("cluster/decoding/sequence.py", "from paceline.prefix_hash import extend\nimport raymond"),
    ],
)
def test_a_module_that_keeps_the_rules_is_not(tmp_path: Path, module: str, source: str) -> None:
    path = tmp_path / module
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert violations(tmp_path) == []


@pytest.mark.parametrize("package", ["paceline", "cluster.decoding"])
def test_importing_it_brings_no_heavy_library_in(package: str) -> None:
    """Nor do the modules that it imports."""
    heavy = ["ray", "torch", "transformers"]
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((ROOT / package.replace(".", "/")).rglob("*.py"))
    ]
    program = (
        f"import importlib, sys\nfor name in {modules!r}:\n    importlib.import_module(name)\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"

"""No import climbs, rooms import only along the arrows, and the pure rooms stay pure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.floors import (
    ARROWS,
    FLOORS,
    borrowed,
    import_cycle,
    imports_of,
    loose_modules,
    unexported,
    violations,
)

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
        ("workers/drafting/drafter.py", "import cluster.driver.driver"),
        ("workers/drafting/drafter.py", "import ray.util"),
        ("workers/drafting/drafter.py", "from workers.target.faults import blame"),
        ("workers/verification/choice.py", "from workers.engine import engine"),
        ("cluster/decoding/sequence.py", "def late():\n    import cluster.driver.text"),
        ("workers/verification/choice.py", "import time"),
        ("workers/verification/choice.py", "from random import random"),
        ("cluster/decoding/sequence.py", "import asyncio"),
        ("cluster/decoding/sequence.py", "from google import protobuf"),
        ("cluster/decoding/sequence.py", "from google.protobuf.message import Message"),
        ("cluster/decoding/sequence.py", "from paceline.v1 import types_pb2"),
        ("cluster/decoding/sequence.py", "from paceline import v1"),
        ("cluster/decoding/sequence.py", "import torch.nn"),
        ("cluster/decoding/sequence.py", "if TYPE_CHECKING:\n    import transformers"),
        ("cluster/decoding/sequence.py", "from ... import deploy"),
        ("cluster/driver/driver.py", "from ...deploy import cli"),
        ("cluster/driver/driver.py", "import importlib\nimportlib.import_module('deploy.cli')"),
        ("cluster/driver/driver.py", "import_module(name)"),
        ("cluster/driver/driver.py", "import_module(f'deploy.cli.{name}')"),
        ("cluster/driver/driver.py", "import_module(f'dep{name}')"),
        ("cluster/driver/driver.py", "__import__('deploy')"),
        ("deploy/cli/__main__.py", "import tests.tiny"),
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
        (
            "deploy/cli/__main__.py",
            "import ray, torch, cluster.driver.text, paceline.errors",
        ),
        ("deploy/cli/__main__.py", "import_module(f'deploy.cli.{name}')"),
        (
            "cluster/driver/driver.py",
            "import asyncio\nfrom . import text\nfrom paceline.v1 import x",
        ),
        ("workers/verification/choice.py", "import torch\nfrom ..process import kernels"),
        ("cluster/decoding/sequence.py", "from paceline.prefix_hash import extend\nimport raymond"),
    ],
)
def test_a_module_that_keeps_the_rules_is_not(tmp_path: Path, module: str, source: str) -> None:
    path = tmp_path / module
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert violations(tmp_path) == []


def test_the_arrows_run_in_no_ring() -> None:
    below: set[str] = set()
    for room, allowed in ARROWS.items():  # in an order in which each names those before it
        floor = room.partition(".")[0]
        assert {f"{floor}.{one}" for one in allowed} <= below
        below.add(room)


def test_modules_import_one_another_in_no_ring() -> None:
    assert import_cycle(ROOT) == []


def test_a_ring_of_imports_is_found(tmp_path: Path) -> None:
    (tmp_path / "paceline").mkdir()
    (tmp_path / "paceline" / "a.py").write_text("from paceline import b")
    (tmp_path / "paceline" / "b.py").write_text("from paceline.c import f")
    (tmp_path / "paceline" / "c.py").write_text("def f():\n    import paceline.a")
    assert import_cycle(tmp_path) == []
    (tmp_path / "paceline" / "c.py").write_text("import paceline.a")
    assert import_cycle(tmp_path) == ["paceline.a", "paceline.b", "paceline.c"]


def test_rooms_import_only_what_other_rooms_export() -> None:
    assert unexported(ROOT) == []


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("from cluster.decoding.scheduler import Scheduler", None),
        ("from cluster.decoding import scheduler", None),
        ("from cluster.decoding.tree import Tree", "cluster.decoding does not export it"),
        ("from cluster.decoding import tree", "cluster.decoding does not export it"),
        ("def late():\n    import cluster.decoding.tree", "cluster.decoding does not export it"),
        ("from cluster.decoding.scheduler import _order", "which is its file's own"),
        ("from cluster.driver.loop import _tick", "which is its file's own"),
        ("from cluster.driver.loop import tick", None),
        ("from paceline.errors import ConfigError", None),
    ],
)
def test_an_import_of_what_is_not_exported_is_found(
    tmp_path: Path, source: str, complaint: str | None
) -> None:
    for file, text in {
        "paceline/errors.py": "",
        "cluster/decoding/__init__.py": '__all__ = ["scheduler"]',
        "cluster/decoding/scheduler.py": "from cluster.decoding.tree import Tree",
        "cluster/decoding/tree.py": "",
        "cluster/driver/__init__.py": "",
        "cluster/driver/loop.py": "",
        "cluster/driver/driver.py": source,
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    found = unexported(tmp_path)
    assert len(found) == (complaint is not None)
    assert all(one.endswith(complaint or "") for one in found)


def test_an_export_without_a_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "workers" / "target").mkdir(parents=True)
    (tmp_path / "workers" / "__init__.py").write_text('__all__ = ["target"]')
    (tmp_path / "workers" / "target" / "__init__.py").write_text('__all__ = ["shard", "gone"]')
    (tmp_path / "workers" / "target" / "shard.py").touch()
    assert unexported(tmp_path) == ["workers.target exports gone, of which there is no file"]


def test_no_class_uses_private_names_of_a_base_in_another_file() -> None:
    assert borrowed(ROOT) == []


def test_a_class_that_uses_private_names_of_a_base_is_found(tmp_path: Path) -> None:
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "a.py").write_text(
        "class A:\n    def __init__(self):\n        self._x = self._y = 1\n\n\n"
        "class Near(A):\n    def f(self):\n        return self._x\n"
    )
    (tmp_path / "workers" / "b.py").write_text(
        "class B(Near):\n    def f(self):\n        return self._x\n\n\n"
        "class Own(Near):\n    def f(self):\n        self._x = 2\n        return self._x\n"
    )
    assert borrowed(tmp_path) == ["workers/b.py:3 B uses _x of a base in another file"]


def test_nothing_lies_loose_on_a_floor() -> None:
    assert loose_modules(ROOT) == []


@pytest.mark.parametrize("package", ["paceline", "cluster.decoding"])
def test_importing_it_brings_no_heavy_library_in(package: str) -> None:
    """The modules that it imports do not import one either."""
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

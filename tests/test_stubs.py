"""The committed stubs are what proto/ generates, and proto/ is no Python package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def stubs_below(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in (folder / "paceline" / "v1").glob("*_pb2*.py*")
    }


def test_committed_stubs_are_what_the_protos_generate(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "scripts/generate_stubs.py", str(tmp_path)], cwd=ROOT, check=True
    )
    generated = stubs_below(tmp_path)
    committed = stubs_below(ROOT)
    assert len(generated) >= 4
    assert sorted(generated) == sorted(committed), "run `make proto`"
    stale = [name for name, content in generated.items() if committed[name] != content]
    assert not stale, f"run `make proto`: {stale} differ"


def test_stubs_import_each_other_as_paceline_v1() -> None:
    for name, content in stubs_below(ROOT).items():
        for line in content.decode().splitlines():
            if (
                "import" in line
                and "_pb2" in line
                and not line.lstrip().startswith(("#", "+", '"'))
            ):
                assert line.startswith("from paceline.v1 import "), f"{name}: {line}"


def test_proto_is_never_a_python_package() -> None:
    # A package named `proto` shadows the one that Ray's dependencies import.
    assert not list((ROOT / "proto").rglob("*.py*"))

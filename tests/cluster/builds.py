"""Copies of this tree that are marked as another version, and processes that run from them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from workers.process.handshake import own_version

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("paceline", "workers", "cluster")
DRIVER = ROOT / "tests" / "cluster" / "driver_process.py"


def minor_version(apart: int) -> str:
    """Our version with `apart` added to its minor number."""
    major, minor, *_ = own_version().split(".")
    return f"{major}.{int(minor) + apart}.0"


@dataclass(frozen=True)
class Build:
    """A tree of packages with a version of its own."""

    folder: Path

    @classmethod
    def marked(cls, folder: Path, version: str) -> Build:
        """Copy the packages, and mark them by what importlib.metadata reads, as pip would."""
        for name in PACKAGES:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        information = folder / f"paceline-{version}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: paceline\nVersion: {version}\n"
        )
        return cls(folder)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Run Python in this tree. Its first line says that it serves, or is ready."""
        return subprocess.Popen(
            [sys.executable, "-P", *arguments],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(self.folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

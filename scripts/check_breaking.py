"""Fail if a change of proto/ breaks the wire contract of the last release, or else of HEAD.

A release is a tag `v*`. Before the first release, proto/ is compared with HEAD. Without git, or if
that commit has no proto/, there is nothing to compare with, and the check passes.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def _git(*arguments: str) -> bytes | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def main() -> None:
    """Run `buf breaking` and exit with its code."""
    tag = _git("describe", "--tags", "--match", "v*", "--abbrev=0")
    base = tag.decode().strip() if tag else "HEAD"
    archive = _git("archive", base, "proto", "buf.yaml")
    if archive is None:
        print(f"buf breaking: {base} has no proto/ to compare with")
        return
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(folder, filter="data")
        buf = Path(sys.executable).with_name("buf")
        done = subprocess.run([str(buf), "breaking", "--against", folder], cwd=ROOT)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()

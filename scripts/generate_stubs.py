"""Write the Python stubs of proto/ into a folder; by default, into the checkout's root.

Each proto file gets a `_pb2.py` and a `.pyi`; one with a service also a `_pb2_grpc.py` and a
`.pyi`. Stubs whose proto file is gone are removed. Run it as `make proto`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"


def _protoc(plugins: list[str], folder: Path, sources: list[Path]) -> None:
    environment = dict(os.environ)
    # The mypy plugins are programs beside the interpreter that runs this script.
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}"]
    for plugin in plugins:
        options = "quiet:" if plugin.startswith("mypy") else ""
        command.append(f"--{plugin}_out={options}{folder}")
    command += [str(source.relative_to(PROTO)) for source in sources]
    done = subprocess.run(command, cwd=PROTO, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"protoc failed:\n{done.stderr}")


def generate(folder: Path) -> list[Path]:
    """Write all stubs below `folder`; return their paths relative to it, sorted."""
    sources = sorted(PROTO.rglob("*.proto"))
    services = [source for source in sources if re.search(r"^service ", source.read_text(), re.M)]
    _protoc(["python", "mypy"], folder, sources)
    _protoc(["grpc_python", "mypy_grpc"], folder, services)
    stubs = []
    for source in sources:
        stem = source.relative_to(PROTO).with_suffix("")
        stubs += [stem.with_name(f"{stem.name}_pb2{suffix}") for suffix in (".py", ".pyi")]
        if source in services:
            stubs += [stem.with_name(f"{stem.name}_pb2_grpc{suffix}") for suffix in (".py", ".pyi")]
    return sorted(stubs)


def committed(folder: Path) -> list[Path]:
    """The paths of the present stubs below `folder`, relative to it, sorted."""
    return sorted(path.relative_to(folder) for path in (folder / "paceline" / "v1").glob("*_pb2*"))


def main() -> None:
    """Generate into the folder named on the command line, or into the checkout."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    folder.mkdir(parents=True, exist_ok=True)
    written = generate(folder)
    for stale in sorted(set(committed(folder)) - set(written)):
        (folder / stale).unlink()
        print(f"removed {stale}")
    for stub in written:
        print(stub)


if __name__ == "__main__":
    main()

"""Which packages of the server are not installed here. It imports none of them."""

from __future__ import annotations

import sys
from importlib.util import find_spec

# What paceline-server depends on, by the names of imports. The client alone has grpc and
# protobuf only. tests/deploy/session/test_packages.py compares this with what it declares.
SERVER_PACKAGES = (
    *("typer", "rich", "pydantic", "numpy", "torch", "transformers", "ray", "psutil"),
    *("fastapi", "uvicorn", "msgpack", "accelerate", "gguf", "safetensors", "tokenizers"),
    *("grpc_health", "grpc_reflection", "jinja2", "llguidance", "google.rpc"),
    *("cryptography", "huggingface_hub", "prometheus_client", "pip", "yaml"),
)


def missing_packages() -> list[str]:
    """Names of packages that a command or a job needs and this Python does not have."""
    return [name for name in SERVER_PACKAGES if not _is_there(name)]


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # "google" of "google.rpc" is not there either.
        return False


def check_python(module: str) -> None:
    """End this process with exit code 2 if its Python lacks packages; stderr says what to do.

    A job calls it first: `ray job submit --working-dir .` brings our code to whatever Python the
    cluster's PATH names.
    """
    if missing := missing_packages():
        sys.stderr.write(
            f"error: {sys.executable} lacks {', '.join(missing)}. The PATH of the cluster's head "
            "decided which python runs this job. Name one that has paceline-server: `ray job "
            f"submit ... -- /path/to/.venv/bin/python -m {module} ...`, or install it in this one "
            "(docs/operations.md)\n"
        )
        sys.exit(2)

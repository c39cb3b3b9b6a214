"""Which packages of the server are not installed here. It imports none of them."""

from __future__ import annotations

from importlib.util import find_spec

# `pip install paceline` installs none of them.
_SERVER_PACKAGES = (
    *("typer", "rich", "pydantic", "numpy", "torch", "transformers", "ray", "psutil"),
    *("fastapi", "uvicorn", "msgpack"),
)


def missing_packages() -> list[str]:
    """Names of packages that a command or a job needs and this Python does not have."""
    return [name for name in _SERVER_PACKAGES if find_spec(name) is None]

"""Files of API keys, and a clock that a test moves."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

from cluster.access.keys import digest_of, new_key

_TIMES = itertools.count(1_000_000_000)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def entry_of(key: str, name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "tenant": f"tenant of {name}", "sha256": digest_of(key).hex()} | fields


def write_keys(path: Path, *entries: dict[str, Any]) -> None:
    """Replace the file. Each version has a time of its own, however fast the test is."""
    beside = path.with_suffix(".new")
    beside.write_text("# keys\n\n" + "".join(f"{json.dumps(one)}\n" for one in entries))
    stamp = next(_TIMES)
    os.utime(beside, (stamp, stamp))
    beside.replace(path)


def keys_in(path: Path, **by_name: dict[str, Any]) -> dict[str, str]:
    """Write a file with a key for each name, whose value has fields of its entry."""
    keys = {name: new_key() for name in by_name}
    write_keys(path, *(entry_of(keys[name], name, **more) for name, more in by_name.items()))
    return keys

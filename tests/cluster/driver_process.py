"""A driver as a process without Ray, led by lines of JSON on its stdin. Not imported by tests.

    python -P driver_process.py FOLDER PORT NAME LIFE NUM_GROUPS

It says "ready" once it has imported everything, takes the first line, and says where it serves and
which version it is. Each line names all workers: {"target": [ADDRESS...], "drafters": {NAME:
ADDRESS}}. It answers "told". It ends with its stdin.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from cluster.driver.driver import DriverOptions
from cluster.driver.service import serve_driver
from workers.process.handshake import DriverIdentity, own_version


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def _main(folder: str, port: str, name: str, life: str, num_groups: str) -> None:
    loop = asyncio.get_running_loop()
    _say("ready")
    told = json.loads(await loop.run_in_executor(None, sys.stdin.readline))
    options = DriverOptions(
        folder=Path(folder),
        target_addresses=tuple(told["target"]),
        target_groups=int(num_groups),
        drafter_addresses=told["drafters"],
        identity=DriverIdentity(name, int(life)),
    )
    driver, server = await serve_driver(options, host="127.0.0.1", port=int(port))
    _say(f"{server.address} {own_version()}")
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        told = json.loads(line)
        driver.set_target(told["target"])
        await driver.set_drafters(told["drafters"])
        _say("told")
    await server.stop()


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))

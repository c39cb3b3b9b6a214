"""A replayed system in a process of its own: `python -m tests.deploy.batch.replayed FOLDER`.

A target and a drafter play their devices' times and texts in place of models. Prints the server's
address as one line, and serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from cluster.driver.driver import DriverOptions
from cluster.driver.service import serve_driver
from workers.emulated.drafter import serve_replay_drafter
from workers.emulated.latency_profiles import load_profile
from workers.emulated.replay_text import Guess
from workers.emulated.target import serve_replay_target
from workers.models.catalog import STAND_IN, resolve_model

HOST = "127.0.0.1"
PLACES = 256


async def serve(home: Path) -> None:
    folder = resolve_model(STAND_IN, home=home).folder
    target = await serve_replay_target(folder, load_profile("8b-h100", role="target"), host=HOST)
    (drafter,) = await serve_replay_drafter(
        folder,
        load_profile("0.5b-h100", role="drafter"),
        [Guess(0.8, 0.5, seed=0)],
        max_sequences=PLACES,
        host=HOST,
    )
    options = DriverOptions(
        folder=folder,
        target_addresses=(target.address,),
        drafter_addresses={"drafter-0": drafter.address},
        max_num_seqs=PLACES,
        max_waiting=4 * PLACES,
    )
    _, driver = await serve_driver(options, host=HOST)
    sys.stdout.write(driver.address + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    for server in (driver, drafter, target):
        await server.stop()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))

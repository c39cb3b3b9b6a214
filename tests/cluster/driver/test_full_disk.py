"""The disk of a log fills up while requests run: they go on, with the same text."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline import Client, Completion, GenerateOptions
from tests.small_disk import small_disk_at

ROOT = Path(__file__).resolve().parents[3]
BYSTANDERS = 4
OPTIONS = GenerateOptions(max_tokens=300, ignore_eos=True, temperature=1.0, seed=7)
# Log at every turn of the event loop that driver, target and drafter share.
_SERVER = """
import asyncio, logging, sys
from pathlib import Path
from tests.cluster.system import make_checkpoints, running_system
from workers.process.logs import WorkerLog

async def make_noise():
    while True:
        for _ in range(20):
            logging.getLogger("noise").error("x" * 500)
        await asyncio.sleep(0)

async def serve(folder, disk):
    WorkerLog(disk / "run", "driver", takes_stderr=True).open()
    checkpoints = make_checkpoints(folder)
    async with running_system(checkpoints, drafters={"drafter-0": checkpoints.drafter}) as system:
        print(system.server.address, flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        noise = asyncio.create_task(make_noise())
        print("noise", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        noise.cancel()

asyncio.run(serve(Path(sys.argv[1]), Path(sys.argv[2])))
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for 256 KiB."""
    with small_disk_at(tmp_path / "disk", kibibytes=256) as folder:
        yield folder


def test_a_full_disk_stops_no_request(small_disk: Path, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(tmp_path), str(small_disk)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        assert address
        with Client(address) as client, ThreadPoolExecutor(BYSTANDERS) as threads:
            plain = client.generate("The sea", OPTIONS).token_ids
            begun = [client.stream("The sea", OPTIONS) for _ in range(BYSTANDERS)]
            for stream in begun:
                next(stream)
            server.stdin.write("fill\n")
            server.stdin.flush()
            assert server.stdout.readline() == "noise\n"

            def rest_of(number: int) -> tuple[int, ...]:
                return tuple(
                    token_id
                    for event in begun[number]
                    for token_id in getattr(event, "token_ids", ())
                )

            assert list(threads.map(rest_of, range(BYSTANDERS))) == [plain] * BYSTANDERS
            assert is_full(small_disk)
            after: Completion = client.generate("The sea", OPTIONS)
            assert after.token_ids == plain
        assert server.poll() is None
        server.stdin.close()
    assert server.returncode == 0


def is_full(disk: Path) -> bool:
    try:
        (disk / "more").write_bytes(bytes(4096))
    except OSError:
        return True
    return False

"""An emulated target as a process: `python -m workers.emulated.target FOLDER --profile NAME`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import typer

from workers.emulated.latency_profiles import DeviceProfile, load_profile
from workers.emulated.replay_target import ReplayEngine
from workers.emulated.replay_text import ReplayText
from workers.engine.load.checkpoint import CheckpointInfo, describe_checkpoint
from workers.process.mutual_tls import WorkerTls
from workers.process.server import RunningServer, start_server
from workers.process.settings import freeze_present_objects
from workers.process.standalone import run_standalone
from workers.target.servicer import TargetShard


def load_replay(folder: Path) -> tuple[CheckpointInfo, ReplayText]:
    """The stand-in checkpoint in `folder`, and the replayed text. Raises CheckpointError."""
    info = describe_checkpoint(folder)
    freeze_present_objects()
    return info, ReplayText(info.vocab_size)


async def serve_replay_target(
    folder: Path,
    profile: DeviceProfile,
    *,
    host: str,
    port: int = 0,
    tls: WorkerTls | None = None,
) -> RunningServer:
    """Start a target that replays. `folder`: the stand-in checkpoint. Raises CheckpointError."""
    info, text = await asyncio.to_thread(load_replay, folder)
    engine = ReplayEngine(info, profile, text)
    shard = TargetShard(clock=engine.clock)
    shard.begin(engine, engine.verdicts)
    server = await start_server(shard.add_to, host=host, port=port, tls=tls)
    shard.on_broken = server.report_broken
    server.life = shard.reception.life
    return server


def main(
    folder: Path,
    profile: str = "70b-4xh100",
    host: str = "127.0.0.1",
    port: int = 0,
    tls: Path | None = None,
) -> None:
    """Serve an emulated target. FOLDER is a stand-in checkpoint (workers/models/stand_in.py)."""
    run_standalone(
        lambda: serve_replay_target(
            folder,
            load_profile(profile, role="target"),
            host=host,
            port=port,
            tls=WorkerTls.of(tls),
        )
    )


if __name__ == "__main__":
    typer.run(main)

"""Emulated workers that replay a text, behind the same servicers as real workers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from workers.drafting.desk import DraftingDesk
from workers.drafting.service import Drafter
from workers.emulated.device_clock import DeviceClock
from workers.emulated.profiles import DeviceProfile
from workers.emulated.recording import Recording
from workers.emulated.replay_proposer import ReplayProposer
from workers.emulated.replay_target import ReplayEngine
from workers.emulated.replay_text import Guess, ReplayText
from workers.engine.load.checkpoint import CheckpointInfo, describe_checkpoint
from workers.process.server import RunningServer, start_server
from workers.process.settings import freeze_present_objects
from workers.target.servicer import TargetShard


async def serve_replay_target(
    folder: Path,
    profile: DeviceProfile,
    recording: Recording | None = None,
    *,
    host: str,
    port: int = 0,
) -> RunningServer:
    """Start a target that replays. `folder`: the stand-in checkpoint. Raises CheckpointError."""
    info, text = await asyncio.to_thread(_load, folder, recording)
    engine = ReplayEngine(info, profile, text)
    shard = TargetShard(clock=engine.clock)
    shard.begin(engine, engine.verdicts)
    server = await start_server(shard.add_to, host=host, port=port)
    shard.on_broken = server.report_broken
    return server


async def serve_replay_drafter(
    folder: Path,
    profile: DeviceProfile,
    guesses: Sequence[Guess],
    recording: Recording | None = None,
    *,
    max_sequences: int = 256,
    host: str,
) -> list[RunningServer]:
    """Start one emulated device that guesses in several ways: one server, with its own port, per
    guess.

    The servers share the device, so use them one after the other. Raises CheckpointError.
    """
    info, text = await asyncio.to_thread(_load, folder, recording)
    clock = DeviceClock()
    servers = []
    for guess in guesses:
        drafter = Drafter(clock)
        server = await start_server(drafter.add_to, host=host)
        server.on_stop(drafter.end)
        drafter.on_broken = server.report_broken
        proposer = ReplayProposer(
            info.max_model_len,
            profile,
            text,
            guess,
            clock,
            vocabulary_digest=info.vocabulary_digest,
        )
        drafter.begin(DraftingDesk(proposer, max_sequences=max_sequences))
        servers.append(server)
    return servers


def _load(folder: Path, recording: Recording | None) -> tuple[CheckpointInfo, ReplayText]:
    info = describe_checkpoint(folder)
    recorded = recording.keys(info.vocab_size) if recording is not None else None
    freeze_present_objects()
    return info, ReplayText(info.vocab_size, recorded)

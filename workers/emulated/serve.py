"""Emulated workers behind the servicers of the real ones."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from workers import drafter as real_drafter
from workers import target_shard as real_target
from workers.cores import pin_cores
from workers.drafter import DrafterOptions
from workers.drafting.desk import DraftingDesk
from workers.drafting.model import ModelProposer
from workers.drafting_service import Drafter
from workers.emulated.device_clock import DeviceClock
from workers.emulated.dilated import DilatedEngine, DilatedProposer, check_dilation
from workers.emulated.profiles import DeviceProfile
from workers.emulated.recording import Recording
from workers.emulated.replay_proposer import ReplayProposer
from workers.emulated.replay_target import ReplayEngine
from workers.emulated.replay_text import Guess, ReplayText
from workers.engine.checkpoint import CheckpointInfo, inspect_checkpoint
from workers.engine.rank_parts import Progress
from workers.garbage import spare_what_is_there
from workers.server import RunningServer, start_server
from workers.target_servicer import TargetShard
from workers.target_shard import TargetShardOptions


async def serve_replay_target(
    folder: Path,
    profile: DeviceProfile,
    recording: Recording | None = None,
    *,
    host: str,
    port: int = 0,
) -> RunningServer:
    """A target that replays. `folder`: the stand-in checkpoint. Raises CheckpointError."""
    info, text = await asyncio.to_thread(_load, folder, recording)
    engine = ReplayEngine(info, profile, text)
    shard = TargetShard(clock=engine.clock)
    shard.begin(engine, engine.verdicts)
    return await start_server(shard.add_to, host=host, port=port)


async def serve_dilated_target(
    options: TargetShardOptions,
    profile: DeviceProfile,
    dilation: float,
    *,
    host: str,
    port: int = 0,
    progress: Progress | None = None,
) -> RunningServer:
    """A target that computes in slow motion. Raises what serve_target_shard does, and ConfigError
    where the model is too slow for the dilation.
    """
    if options.cores is not None:
        pin_cores(options.cores)
    clock = DeviceClock(dilation)
    shard = TargetShard(threads=options.threads, clock=clock)

    async def load() -> None:
        engine = DilatedEngine(
            await real_target.load_target(options, progress=progress), profile, clock
        )
        shard.begin(engine, engine.verdicts)

    return await real_target.serve_once_loaded(shard, load, host=host, port=port)


async def serve_dilated_drafter(
    options: DrafterOptions, profile: DeviceProfile, dilation: float, *, host: str, port: int = 0
) -> RunningServer:
    """A model drafter that computes in slow motion. Raises what serve_drafter does, and ConfigError
    where the model is too slow for the dilation.
    """
    if options.cores is not None:
        pin_cores(options.cores)
    clock = DeviceClock(dilation)
    drafter = Drafter(clock)

    async def load() -> None:
        engine = await real_drafter.load_drafter_model(options)
        check_dilation(engine, profile, dilation, tokens=1)
        model = ModelProposer(engine, prefix_cache=options.prefix_cache)
        proposer = DilatedProposer(model, profile, clock)
        drafter.begin(DraftingDesk(proposer, max_sequences=options.max_sequences))

    return await real_drafter.serve_once_loaded(drafter, load, host=host, port=port)


async def serve_replay_drafter(
    folder: Path,
    profile: DeviceProfile,
    guesses: Sequence[Guess],
    recording: Recording | None = None,
    *,
    max_sequences: int = 256,
    host: str,
) -> list[RunningServer]:
    """One emulated device that guesses in several ways: a server on a port of its own for each.

    They share the device, so they are for use one after the other. Raises CheckpointError.
    """
    info, text = await asyncio.to_thread(_load, folder, recording)
    clock = DeviceClock()
    servers = []
    for guess in guesses:
        drafter = Drafter(clock)
        server = await start_server(drafter.add_to, host=host)
        server.on_stop(drafter.end)
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
    info = inspect_checkpoint(folder)
    recorded = recording.keys(info.vocab_size) if recording is not None else None
    spare_what_is_there()
    return info, ReplayText(info.vocab_size, recorded)

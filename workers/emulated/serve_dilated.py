"""Emulated workers that compute in slow motion, behind the servicers of the real ones."""

from __future__ import annotations

from workers import drafter as real_drafter
from workers import target_shard as real_target
from workers.cores import pin_cores
from workers.drafter import DrafterOptions
from workers.drafter_model import load_drafter_model
from workers.drafting.desk import DraftingDesk
from workers.drafting.model import ModelProposer
from workers.drafting_service import Drafter
from workers.emulated.device_clock import DeviceClock
from workers.emulated.dilated import DilatedEngine, DilatedProposer, check_dilation
from workers.emulated.profiles import DeviceProfile
from workers.engine.rank_parts import Progress
from workers.server import RunningServer
from workers.target_servicer import TargetShard
from workers.target_shard import TargetShardOptions


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
        engine = await load_drafter_model(options)
        check_dilation(engine, profile, dilation, tokens=1)
        model = ModelProposer(engine, prefix_cache=options.prefix_cache)
        proposer = DilatedProposer(model, profile, clock)
        drafter.begin(DraftingDesk(proposer, max_sequences=options.max_sequences))

    return await real_drafter.serve_once_loaded(drafter, load, host=host, port=port)

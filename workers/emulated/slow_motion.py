"""A dilated worker as a process: `python -m workers.emulated.slow_motion FOLDER --profile NAME`.

The profile's role says whether it is a target or a drafter.
"""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path

import typer

from workers.drafter import DrafterOptions
from workers.emulated.profiles import load_profile
from workers.emulated.serve_dilated import serve_dilated_drafter, serve_dilated_target
from workers.server import RunningServer
from workers.standalone import parse_weights, run_standalone
from workers.target_shard import TargetShardOptions


def main(
    folder: Path,
    profile: str = "70b-4xh100",
    dilation: float = 10.0,
    weights: str = "float32",
    threads: int = 1,
    kv_memory_mib: int = 400,
    host: str = "127.0.0.1",
    port: int = 0,
) -> None:
    """Serve an emulated worker that computes with the checkpoint in FOLDER, in slow motion."""
    device = load_profile(profile)
    form, memory = parse_weights(weights), kv_memory_mib * 1024 * 1024

    def serve() -> Awaitable[RunningServer]:
        if device.role == "target":
            target = TargetShardOptions(
                folder=folder, weights=form, threads=threads, kv_memory_bytes=memory
            )
            return serve_dilated_target(target, device, dilation, host=host, port=port)
        drafter = DrafterOptions(
            kind="model", folder=folder, weights=form, threads=threads, kv_memory_bytes=memory
        )
        return serve_dilated_drafter(drafter, device, dilation, host=host, port=port)

    run_standalone(serve)


if __name__ == "__main__":
    typer.run(main)

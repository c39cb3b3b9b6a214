"""An emulated target as a process: `python -m workers.emulated.target FOLDER --profile NAME`."""

from __future__ import annotations

from pathlib import Path

import typer

from workers.emulated.profiles import load_profile
from workers.emulated.recording import load_recording
from workers.emulated.serve import serve_replay_target
from workers.process.standalone import run_standalone


def main(
    folder: Path,
    profile: str = "70b-4xh100",
    recording: Path | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
) -> None:
    """Serve an emulated target. FOLDER is a stand-in checkpoint (workers/emulated/stand_in.py)."""
    run_standalone(
        lambda: serve_replay_target(
            folder,
            load_profile(profile, role="target"),
            load_recording(recording) if recording is not None else None,
            host=host,
            port=port,
        )
    )


if __name__ == "__main__":
    typer.run(main)

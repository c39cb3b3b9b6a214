"""An emulated drafter as a process: `python -m workers.emulated.drafter FOLDER GUESS...`.

A GUESS is "acceptance/hit rate/seed", such as 0.75/0.85/1 or recorded/recorded/0. Each guess gets a
port of its own; the addresses are printed in the order of the guesses.
"""

from __future__ import annotations

from pathlib import Path

import typer

from paceline.errors import ConfigError
from workers.emulated.profiles import load_profile
from workers.emulated.recording import load_recording
from workers.emulated.replay_text import Guess
from workers.emulated.serve import serve_replay_drafter
from workers.process.standalone import run_standalone


def parse_guess(text: str) -> Guess:
    """A Guess from text such as "0.75/0.85/1". Raises ConfigError."""
    parts = text.split("/")
    try:
        acceptance, hit_rate = (None if p == "recorded" else float(p) for p in parts[:2])
        return Guess(acceptance, hit_rate, int(parts[2]))
    except (ValueError, IndexError):
        raise ConfigError(
            f'expected a guess like "0.75/0.85/1" or "recorded/recorded/0", got {text!r}'
        ) from None


def main(
    folder: Path,
    guesses: list[str],
    profile: str = "1b-h100",
    recording: Path | None = None,
    host: str = "127.0.0.1",
) -> None:
    """Serve an emulated drafter. FOLDER is a stand-in checkpoint."""
    run_standalone(
        lambda: serve_replay_drafter(
            folder,
            load_profile(profile, role="drafter"),
            [parse_guess(text) for text in guesses],
            load_recording(recording) if recording is not None else None,
            host=host,
        )
    )


if __name__ == "__main__":
    typer.run(main)

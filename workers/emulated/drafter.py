"""An emulated drafter as a process: `python -m workers.emulated.drafter FOLDER GUESS...`.

A GUESS is "acceptance/hit rate/seed", such as 0.75/0.85/1. Each guess gets a port of its own; the
addresses are printed in the order of the guesses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import typer

from paceline.errors import ConfigError
from workers.drafting.desk import DraftingDesk
from workers.drafting.drafter import serve_once_loaded
from workers.drafting.service import Drafter
from workers.emulated.device_wait import DeviceClock
from workers.emulated.latency_profiles import DeviceProfile, load_profile
from workers.emulated.replay_proposer import ReplayProposer
from workers.emulated.replay_text import Guess
from workers.emulated.target import load_replay
from workers.process.mutual_tls import WorkerTls
from workers.process.server import RunningServer
from workers.process.standalone import run_standalone


async def serve_replay_drafter(
    folder: Path,
    profile: DeviceProfile,
    guesses: Sequence[Guess],
    *,
    max_sequences: int = 256,
    host: str,
    port: int = 0,
    tls: WorkerTls | None = None,
) -> list[RunningServer]:
    """Start one emulated device with a server, on a port of its own, for each of `guesses`.

    `port`: of the first; 0: a free one. The servers share the device, so use them one after the
    other. Raises CheckpointError.
    """
    info, text = await asyncio.to_thread(load_replay, folder)
    clock = DeviceClock()

    async def serve(guess: Guess, port: int) -> RunningServer:
        drafter = Drafter(clock)
        digest = info.vocabulary_digest
        proposer = ReplayProposer(
            info.max_model_len, profile, text, guess, clock, vocabulary_digest=digest
        )

        async def load() -> None:
            drafter.begin(DraftingDesk(proposer, max_sequences=max_sequences))

        return await serve_once_loaded(drafter, load, host=host, port=port, tls=tls)

    return [await serve(guess, 0 if number else port) for number, guess in enumerate(guesses)]


def parse_guess(text: str) -> Guess:
    """A Guess from text such as "0.75/0.85/1". Raises ConfigError."""
    parts = text.split("/")
    try:
        return Guess(float(parts[0]), float(parts[1]), int(parts[2]))
    except (ValueError, IndexError):
        raise ConfigError(f'expected a guess like "0.75/0.85/1", got {text!r}') from None


def main(
    folder: Path,
    guesses: list[str],
    profile: str = "1b-h100",
    host: str = "127.0.0.1",
    port: int = 0,
    tls: Path | None = None,
) -> None:
    """Serve an emulated drafter. FOLDER is a stand-in checkpoint."""
    run_standalone(
        lambda: serve_replay_drafter(
            folder,
            load_profile(profile, role="drafter"),
            [parse_guess(text) for text in guesses],
            host=host,
            port=port,
            tls=WorkerTls.of(tls),
        )
    )


if __name__ == "__main__":
    typer.run(main)

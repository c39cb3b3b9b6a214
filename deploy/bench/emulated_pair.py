"""The processes of an emulated target and its drafters, and links of several lengths to them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from paceline.errors import UnavailableError
from workers.emulated.replay_text import Guess

LOOPBACK_RTT_MS = 0.1
"""Links up to this long are loopback itself, whose gRPC round trip is longer than that anyway."""


@dataclass(frozen=True, slots=True)
class PairLayout:
    """What is started: latency profiles, how many drafters, links, ways to guess."""

    target_profile: str
    drafter_profile: str
    num_drafters: int
    rtts_ms: tuple[float, ...]
    guesses: tuple[Guess, ...]
    recording: Path


class EmulatedPair:
    """Starts the processes; all end with the block. Idle ones take no processor time."""

    def __init__(self, layout: PairLayout, stand_in: Path, log_folder: Path) -> None:
        """`stand_in`: the checkpoint of workers/emulated/stand_in.py."""
        self._layout = layout
        self._stand_in = stand_in
        self._log_folder = log_folder
        self._stack = ExitStack()
        self._drafters: dict[tuple[float, Guess], dict[str, str]] = {}
        self.target_address = ""

    def drafters(self, rtt_ms: float, guess: Guess, count: int) -> Mapping[str, str]:
        """Addresses by name of `count` drafters at the end of a link, guessing so."""
        found = self._drafters[rtt_ms, guess]
        return dict(list(found.items())[:count])

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _start(self) -> None:
        layout, folder = self._layout, str(self._stand_in)
        recording = ("--recording", str(layout.recording))
        target = self._launch(
            "target", [folder, "--profile", layout.target_profile, *recording], module="target"
        )
        spelled = [_spell(guess) for guess in layout.guesses]
        drafters = [
            self._launch(
                f"drafter-{number}",
                [folder, *spelled, "--profile", layout.drafter_profile, *recording],
                module="drafter",
            )
            for number in range(layout.num_drafters)
        ]
        (self.target_address,) = _addresses(target, 1, self._log_folder / "target.log")
        for number, process in enumerate(drafters):
            name = f"drafter-{number}"
            near = _addresses(process, len(spelled), self._log_folder / f"{name}.log")
            for rtt_ms in layout.rtts_ms:
                ends = near
                if rtt_ms > LOOPBACK_RTT_MS:
                    link = f"link-{number}-{rtt_ms:g}ms"
                    relay = self._launch(link, [*near, "--rtt-ms", str(rtt_ms)], module="relay")
                    ends = _addresses(relay, len(near), self._log_folder / f"{link}.log")
                for guess, address in zip(layout.guesses, ends, strict=True):
                    self._drafters.setdefault((rtt_ms, guess), {})[name] = address

    def _launch(self, name: str, arguments: Sequence[str], *, module: str) -> subprocess.Popen[str]:
        with (self._log_folder / f"{name}.log").open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", f"workers.emulated.{module}", *arguments],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._stack.callback(_end, process)
        return process


def _spell(guess: Guess) -> str:
    """As workers/emulated/drafter.py reads it."""
    rates = (guess.acceptance, guess.hit_rate)
    return "/".join(
        ["recorded" if rate is None else str(rate) for rate in rates] + [str(guess.seed)]
    )


def _addresses(process: subprocess.Popen[str], count: int, log: Path) -> list[str]:
    assert process.stdout is not None
    found = []
    for _ in range(count):
        line = process.stdout.readline().strip()
        if not line:
            tail = log.read_text(encoding="utf-8", errors="replace").strip()[-400:]
            raise UnavailableError(f"an emulated worker ended as it started: {tail}")
        found.append(line)
    return found


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()

"""Targets and drafters for `bench lookahead`: emulated at the ends of links, and the demo pair."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from deploy.bench.time_sharing import time_sharing
from deploy.bench.worker_processes import WorkerProcess, WorkerProcesses
from workers.emulated.replay_text import Guess
from workers.models import ModelFiles

LOOPBACK_RTT_MS = 0.1
"""Links up to this long are loopback itself, whose gRPC round trip is longer than that anyway."""

_NATURAL_KV_MIB = 400
"""A sequence of the demo pair's whole context takes 360."""


class Pair(Protocol):
    """What a cell is measured on. `folder`: the checkpoint that the driver reads.

    `target_addresses`: of its target groups, a shard each. `dilation`: how many times slower
    everything is than what it stands for.
    """

    folder: Path
    target_addresses: tuple[str, ...]
    dilation: float

    def drafters(self, rtt_ms: float, guess: Guess, count: int) -> Mapping[str, str]:
        """Addresses by name of `count` drafters at the end of a link, guessing so."""


@dataclass(frozen=True, slots=True)
class PairLayout:
    """What is started: latency profiles, how many drafters and targets, links, ways to guess."""

    target_profile: str
    drafter_profile: str
    num_drafters: int
    rtts_ms: tuple[float, ...]
    guesses: tuple[Guess, ...]
    recording: Path | None
    num_targets: int = 1


class EmulatedPair(WorkerProcesses):
    """Processes that replay. Idle ones take no processor time."""

    dilation = 1.0

    def __init__(self, layout: PairLayout, stand_in: Path, log_folder: Path) -> None:
        """`stand_in`: the checkpoint of workers/emulated/stand_in.py."""
        super().__init__(log_folder)
        self.folder = stand_in
        self.target_addresses: tuple[str, ...] = ()
        self._layout = layout
        self._drafters: dict[tuple[float, Guess], dict[str, str]] = {}

    def drafters(self, rtt_ms: float, guess: Guess, count: int) -> Mapping[str, str]:
        """Addresses by name of `count` drafters at the end of a link, guessing so."""
        found = self._drafters[rtt_ms, guess]
        return dict(list(found.items())[:count])

    def start(self) -> None:
        """Launch target, drafters and links; return when all serve."""
        layout = self._layout
        recording = ["--recording", str(layout.recording)] if layout.recording else []
        common = [str(self.folder), *recording]
        targets = [
            self.launch(
                f"target-{number}",
                "workers.emulated.target",
                [*common, "--profile", layout.target_profile],
            )
            for number in range(layout.num_targets)
        ]
        spelled = [_spell(guess) for guess in layout.guesses]
        drafters = {
            name: self.launch(
                name,
                "workers.emulated.drafter",
                [*common, *spelled, "--profile", layout.drafter_profile],
            )
            for name in (f"drafter-{number}" for number in range(layout.num_drafters))
        }
        self.target_addresses = tuple(address for one in targets for address in one.addresses(1))
        for name, drafter in drafters.items():
            near = drafter.addresses(len(spelled))
            for rtt_ms in layout.rtts_ms:
                ends = near
                if rtt_ms > LOOPBACK_RTT_MS:
                    relay = self.launch(
                        f"link-{name}-{rtt_ms:g}ms",
                        "workers.emulated.relay",
                        [*near, "--rtt-ms", str(rtt_ms)],
                    )
                    ends = relay.addresses(len(near))
                for guess, address in zip(layout.guesses, ends, strict=True):
                    self._drafters.setdefault((rtt_ms, guess), {})[name] = address


class NaturalPair(WorkerProcesses):
    """A real target and a real drafter on a core each, whose passes take what they take.

    They compute all the time, so they have no priority over the driver (time_sharing.py).
    """

    dilation = 1.0

    def __init__(self, target: ModelFiles, drafter: ModelFiles, log_folder: Path) -> None:
        super().__init__(log_folder)
        self.folder = target.folder
        self.target_addresses: tuple[str, ...] = ()
        self._target = target
        self._drafter = drafter
        self._drafter_address = ""

    def drafters(self, rtt_ms: float, guess: Guess, count: int) -> Mapping[str, str]:
        """The one drafter, whatever is asked for: it guesses as it does, on loopback."""
        return {"drafter-0": self._drafter_address}

    def start(self) -> None:
        """Launch both; return when they serve."""
        target, drafter = self._target, self._drafter
        memory = ("--kv-memory-mib", str(_NATURAL_KV_MIB))
        with time_sharing():
            shard = self.launch(
                "shard",
                "workers.target_shard",
                [str(target.folder), "--weights", target.weights, *memory],
            )
            small = self.launch(
                "drafter",
                "workers.drafter",
                [str(drafter.folder), "--weights", drafter.weights, *memory],
            )
        self.target_addresses = tuple(shard.addresses(1))
        (self._drafter_address,) = small.addresses(1)


class DilatedPair(WorkerProcesses):
    """The demo pair in slow motion, links included: a core each, at the pace of other devices."""

    def __init__(
        self,
        layout: PairLayout,
        dilation: float,
        target: ModelFiles,
        drafter: ModelFiles,
        log_folder: Path,
    ) -> None:
        """Of `layout` counts: profiles and links."""
        super().__init__(log_folder)
        self.folder = target.folder
        self.target_addresses: tuple[str, ...] = ()
        self.dilation = dilation
        self._layout = layout
        self._target = target
        self._drafter = drafter
        self._ends: dict[float, str] = {}

    def drafters(self, rtt_ms: float, guess: Guess, count: int) -> Mapping[str, str]:
        """The one drafter at the end of a link: it guesses as it does."""
        return {"drafter-0": self._ends[rtt_ms]}

    def start(self) -> None:
        """Launch both and the links; return when they serve."""
        layout = self._layout
        shard = self._compute("slow-shard", layout.target_profile, self._target)
        small = self._compute("slow-drafter", layout.drafter_profile, self._drafter)
        self.target_addresses = tuple(shard.addresses(1))
        (near,) = small.addresses(1)
        for rtt_ms in layout.rtts_ms:
            relay = self.launch(
                f"slow-link-{rtt_ms:g}ms",
                "workers.emulated.relay",
                [near, "--rtt-ms", str(rtt_ms * self.dilation)],
            )
            (self._ends[rtt_ms],) = relay.addresses(1)

    def _compute(self, name: str, profile: str, model: ModelFiles) -> WorkerProcess:
        return self.launch(
            name,
            "workers.emulated.slow_motion",
            [
                *(str(model.folder), "--weights", model.weights, "--profile", profile),
                *("--dilation", str(self.dilation), "--kv-memory-mib", str(_NATURAL_KV_MIB)),
            ],
        )


def _spell(guess: Guess) -> str:
    """As workers/emulated/drafter.py reads it."""
    rates = (guess.acceptance, guess.hit_rate)
    return "/".join(
        ["recorded" if rate is None else str(rate) for rate in rates] + [str(guess.seed)]
    )

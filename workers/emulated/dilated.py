"""Emulated devices that compute: real models in slow motion.

A small model on a CPU is slower than a large one on its GPUs. So all times of the devices that are
emulated (passes, links, waits) are multiplied by one factor, the dilation, which is chosen such
that the real passes hide within the emulated ones. Logits, verification and acceptance are those
of the real models; the ratios between all times are those of the devices. Workers and driver tell
durations in the devices' own time, that is, divided by the factor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from paceline.errors import ConfigError
from paceline.v1 import target_pb2
from workers.drafting.nodes import Kept, NewNodes
from workers.drafting.proposer import DrafterInfo, Pass, Proposer, TopTokens
from workers.drafting.tree import DraftTree
from workers.emulated.device_clock import DeviceClock
from workers.emulated.profiles import EMULATED, DeviceProfile
from workers.engine.open import AnyEngine
from workers.engine.slices import Slice
from workers.target_session import VerdictTask
from workers.verdicts import verdicts_of

_TRIED_WINDOW = 8
"""Candidates of the pass that is tried before a target serves."""
_TRIES = 3


class DilatedEngine:
    """A target's engine whose steps take as long as those of the profile's device, dilated."""

    def __init__(self, engine: AnyEngine, profile: DeviceProfile, clock: DeviceClock) -> None:
        """Raises ConfigError where the real engine is too slow for the clock's dilation."""
        check_dilation(engine, profile, clock.dilation, tokens=1 + _TRIED_WINDOW)
        self.info = replace(
            engine.info, name=f"{EMULATED}{profile.name}, {engine.info.name} x{clock.dilation:g}"
        )
        self.max_model_len = engine.max_model_len
        self.block_size = engine.block_size
        self.num_blocks = engine.num_blocks
        self.dtype = engine.dtype
        self.batch_invariant = engine.batch_invariant
        self.forward_seconds = 0.0
        self.forward_end = 0.0
        self._engine = engine
        self._profile = profile
        self._clock = clock
        self._begin = 0.0
        self._seconds = 0.0

    def step(self, slices: Sequence[Slice]) -> torch.Tensor:
        """Feed every slice. The device is busy with it until `verdicts` returns."""
        self._begin = self._clock.now()
        tokens = sum(len(piece.token_ids) for piece in slices)
        self._seconds = self._profile.pass_ms.ms(len(slices), tokens) / 1000
        return self._engine.step(slices)

    def move_kv(self, block_table: Sequence[int], moves: Sequence[tuple[int, int]]) -> None:
        """Copy KV of one slot of a sequence to another, pair by pair in order."""
        self._engine.move_kv(block_table, moves)

    def verdicts(
        self, logits_TV: torch.Tensor, tasks: Sequence[VerdictTask]
    ) -> list[target_pb2.Verdict]:
        """The real verdicts, when the device would be done: verifying is part of its pass."""
        found = verdicts_of(logits_TV, tasks)
        self.forward_end = self._clock.finish(self._begin, self._seconds)
        self.forward_seconds = self._seconds + self._clock.overrun_seconds
        return found


class DilatedProposer:
    """A model drafter whose passes take as long as those of the profile's device, dilated."""

    def __init__(self, proposer: Proposer, profile: DeviceProfile, clock: DeviceClock) -> None:
        self._proposer = proposer
        self._profile = profile
        self._clock = clock

    @property
    def info(self) -> DrafterInfo:
        info = self._proposer.info
        return replace(
            info, model=f"{EMULATED}{self._profile.name}, {info.model} x{self._clock.dilation:g}"
        )

    def open(self, tree: DraftTree) -> None:
        self._proposer.open(tree)

    def settle(self, tree: DraftTree, count: int) -> None:
        self._proposer.settle(tree, count)

    def close(self, tree: DraftTree) -> None:
        self._proposer.close(tree)

    def committed(self, tree: DraftTree, kept: Kept, top_tokens: Sequence[TopTokens]) -> None:
        self._proposer.committed(tree, kept, top_tokens)

    def known(self, tree: DraftTree) -> NewNodes:
        return self._proposer.known(tree)

    def promise(self, tree: DraftTree) -> float:
        return self._proposer.promise(tree)

    def run_pass(self, trees: Sequence[DraftTree], *, pass_ms: float) -> Pass:
        begin = self._clock.now()
        result = self._proposer.run_pass(trees, pass_ms=pass_ms)
        if result.sequences_fed:
            milliseconds = self._profile.pass_ms.ms(result.sequences_fed, result.tokens_fed)
            self._clock.finish(begin, milliseconds / 1000)
        return result

    def check_integrity(self, trees: Sequence[DraftTree]) -> None:
        self._proposer.check_integrity(trees)


def check_dilation(
    engine: AnyEngine,
    profile: DeviceProfile,
    dilation: float,
    *,
    tokens: int,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Raise ConfigError unless a real pass over so many tokens fits into a dilated one.

    The fastest of a few tries counts, since what else runs here may end; a pass that is too long
    later on is counted as an overrun. `clock`: seconds.
    """
    ids = [0] * tokens
    table = list(range(-(-tokens // engine.block_size)))
    taken = []
    for _ in range(_TRIES):
        began = clock()
        engine.step([Slice(table, 0, ids, tokens)])
        taken.append(1000 * (clock() - began))
    real_ms, emulated_ms = min(taken), profile.pass_ms.ms(1, tokens)
    if real_ms > emulated_ms * dilation:
        raise ConfigError(
            f"target.dilation is {dilation:g}: too small. A pass over {tokens} tokens takes "
            f"{real_ms:.1f} ms here, and one of {profile.name} {emulated_ms:.1f} ms times "
            f"{dilation:g} = {emulated_ms * dilation:.1f} ms; expected at least "
            f"{1.5 * real_ms / emulated_ms:.0f}, or a smaller model"
        )

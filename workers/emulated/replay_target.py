"""An emulated target: an engine that keeps token ids where a model keeps keys and values.

It answers at the time at which the device of its latency profile would. The answer depends on the
token ids and positions that it *reads in its blocks*, as attention would: those of all slots below
the slice, and of the ancestors in a tree. So the text changes if a block was handed out twice, a
move was forgotten, or a rollback went to the wrong position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paceline.errors import InvalidRequestError
from paceline.v1 import target_pb2
from workers.emulated.device_wait import DeviceClock
from workers.emulated.latency_profiles import EMULATED, DeviceProfile
from workers.emulated.replay_text import PrefixReader, ReplayText
from workers.engine.load.checkpoint import CheckpointInfo
from workers.engine.slices import KvMoves, Slice, moved_slots, positions_of
from workers.target.faults import Part, judge_each
from workers.target.step_sequences import VerdictTask
from workers.target.verdicts import message_of
from workers.verification.verify import Verdict

BLOCK_SIZE = 16
DTYPE = "int32"
"""The dtype that it reports: its blocks hold int32 token ids and positions."""
_EMPTY = -1


@dataclass(frozen=True, slots=True)
class ReplayRows:
    """Takes the place of logits: for each row, a digest of the tokens that the row sees."""

    digests: Sequence[int]


class ReplayEngine:
    """The target's engine, emulated. `info`: the stand-in checkpoint of its vocabulary."""

    def __init__(
        self,
        info: CheckpointInfo,
        profile: DeviceProfile,
        text: ReplayText,
        *,
        num_blocks: int = 8192,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        self.info = replace(info, name=f"{EMULATED}{profile.name}")
        self.max_model_len = info.max_model_len
        self.block_size = block_size
        self.dtype = DTYPE
        self.num_blocks = num_blocks
        self.batch_invariant = True
        self.forward_seconds = 0.0
        self.forward_end = 0.0
        self._begin = 0.0
        self._profile = profile
        self._text = text
        self.clock = DeviceClock()
        # For each slot, the token that was fed into it and the token's position.
        self._slots: NDArray[np.int32] = np.full((num_blocks, block_size, 2), _EMPTY, "<i4")

    def step(self, slices: Sequence[Slice]) -> ReplayRows:
        """Feed every slice. The device counts as busy until `verdicts` returns."""
        self._begin = self.clock.now()
        digests: list[int] = []
        for piece in slices:
            digests += self._feed(piece)
        tokens = sum(len(piece.token_ids) for piece in slices)
        self.forward_seconds = self._profile.pass_ms.ms(len(slices), tokens) / 1000
        return ReplayRows(digests)

    def move_kv(self, moves: Sequence[KvMoves]) -> None:
        size = self.block_size
        sources, targets = moved_slots(moves, size)
        moved = self._slots[sources // size, sources % size]
        self._slots[targets // size, targets % size] = moved

    def verdicts(self, rows: ReplayRows, tasks: Sequence[VerdictTask]) -> list[target_pb2.Verdict]:
        """A verdict for each task that has one: candidates are accepted while they are true tokens.

        Returns when the device would be done: the profile's time includes verification on a GPU. A
        task with another rule than coupled gets an error, since a replay has no distribution.
        """
        parts = []
        end = 0
        for task in tasks:
            end += task.num_rows
            if task.has_verdict:
                window = 1 + len(task.candidates.tree)
                parts.append((task, rows.digests[end - window : end]))
        judged = judge_each(self._judge, parts)
        found = [
            message_of(verdict, task) for verdict, (task, _) in zip(judged, parts, strict=True)
        ]
        self.forward_end = self.clock.finish(self._begin, self.forward_seconds)
        self.forward_seconds += self.clock.overrun_seconds
        return found

    def _judge(self, parts: Sequence[Part[Sequence[int]]]) -> list[Verdict]:
        return [self._verdict(digests, task) for task, digests in parts]

    def _verdict(self, digests: Sequence[int], task: VerdictTask) -> Verdict:
        if task.spec.rule != "coupled":
            raise InvalidRequestError(
                "rule", f"expected coupled, got {task.spec.rule}: a replay has no logits"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(task.spec, name) is not None:
                raise InvalidRequestError(name, "expected none: a replay has no logits")
        if task.spec.structure is not None:
            raise InvalidRequestError("structure", "expected none: a replay has no logits to mask")
        tree, path, node = task.candidates.tree, [], 0
        while True:
            token_id = self._text.next_token(digests[node], task.spec)
            child = tree.child_with(node, token_id)
            if child is None:
                break
            path.append(child)
            node = child + 1
        return Verdict(len(path), token_id, tuple(path))

    def _feed(self, piece: Slice) -> list[int]:
        """Write the fed tokens, and read back what each row with logits sees."""
        start, end = piece.start, piece.start + len(piece.token_ids)
        table = np.asarray(piece.block_table, dtype=np.int64)
        slots = np.arange(start, end)
        blocks, places = table[slots // self.block_size], slots % self.block_size
        self._slots[blocks, places, 0] = piece.token_ids
        self._slots[blocks, places, 1] = positions_of(piece)
        if not piece.num_logits:
            return []
        used = table[: -(-end // self.block_size)]
        held = self._slots[used].reshape(-1, 2)
        first = end - piece.num_logits
        if piece.tree_start is None:
            reader = PrefixReader().read_bytes(held[: first + 1].tobytes())
            readers = [reader]
            for slot in range(first + 1, end):
                readers.append(readers[-1].copy().read_bytes(held[slot].tobytes()))
        else:
            reader = PrefixReader().read_bytes(held[: piece.tree_start].tobytes())
            readers = [reader]
            for node, parent in enumerate(piece.parents):
                pair = held[piece.tree_start + node].tobytes()
                readers.append(readers[parent].copy().read_bytes(pair))
            readers = readers[len(readers) - piece.num_logits :]
        return [reader.digest() for reader in readers]

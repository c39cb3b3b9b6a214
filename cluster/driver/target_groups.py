"""The target groups: their descriptions, which can be used, and how long requests wait for one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import CheckpointError, WorkerLostError
from paceline.limits import MAX_SEQUENCE_TOKENS
from paceline.v1 import target_pb2


@dataclass(frozen=True, slots=True)
class TargetDescription:
    """What all shards of a target group have in common.

    `model`: its name there. `checkpoint_digest`: of the checkpoint's files. `dtype`: the type that
    the model computes in (target.proto).
    """

    model: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    checkpoint_digest: bytes = b""
    dtype: str = ""

    @property
    def checkpoint(self) -> Mapping[str, str]:
        """Properties that all groups must share as long as the driver runs, in words by name."""
        return {
            "model": repr(self.model),
            "vocab_size": str(self.vocab_size),
            "checkpoint_digest": self.checkpoint_digest.hex()[:8] or "unknown",
        }

    @property
    def kv(self) -> Mapping[str, str]:
        """Further properties that groups must share to serve at the same time.

        Otherwise a sequence that moves between groups would not keep its text.
        """
        return {"block_size": str(self.block_size), "dtype": self.dtype or "unknown"}

    @property
    def room(self) -> int:
        """The most tokens that one sequence may have."""
        return min(self.max_model_len, self.num_blocks * self.block_size, MAX_SEQUENCE_TOKENS)


def description_of(
    shards: Sequence[target_pb2.DescribeTargetResponse],
) -> TargetDescription:
    """The description of a group. It is as large as the smallest of its shards."""
    return TargetDescription(
        model=shards[0].model,
        vocab_size=shards[0].vocab_size,
        max_model_len=min(shard.max_model_len for shard in shards),
        block_size=shards[0].block_size,
        num_blocks=min(shard.num_blocks for shard in shards),
        checkpoint_digest=shards[0].checkpoint_digest,
        dtype=shards[0].dtype,
    )


class TargetGroups:
    """The state of the target's groups. If none is there, requests wait a while for one."""

    def __init__(
        self, num_groups: int, *, patience: float, give_up: Callable[[WorkerLostError], None]
    ) -> None:
        """`patience`: seconds from the loss of the last group until `give_up` gets the reason."""
        self.all_joined_once = asyncio.Event()
        """Set once every group of the target has been there."""
        self.num_groups = num_groups
        self._patience = patience
        self._give_up = give_up
        self._trouble: str | None = None
        self._known: dict[int, TargetDescription] = {}
        self._joined: set[int] = set()
        self._impatience: asyncio.TimerHandle | None = None

    @property
    def target(self) -> TargetDescription | None:
        """The description of the known group with the least room; None: none was ever there."""
        return min(self._known.values(), key=lambda one: one.room, default=None)

    @property
    def any_joined(self) -> bool:
        """Whether a group is there now."""
        return bool(self._joined)

    def scale(self, num_groups: int) -> None:
        """The target is to have this number of groups. Those above it do not count any more."""
        self.num_groups = num_groups
        for group in [one for one in self._known if one >= num_groups]:
            if group not in self._joined:
                del self._known[group]
        self._note_joins()

    def join(self, group: int, description: TargetDescription) -> None:
        """A group is there. Raises CheckpointError if it differs from the others."""
        for other, known in self._known.items():
            if other == group:
                continue
            theirs, ours = dict(known.checkpoint), dict(description.checkpoint)
            if other in self._joined:  # A group that is gone may come back changed.
                theirs |= known.kv
                ours |= description.kv
            different = [name for name in ours if ours[name] != theirs[name]]
            if different:
                told = ", ".join(f"{one} {ours[one]} instead of {theirs[one]}" for one in different)
                raise CheckpointError(
                    f"target group {group} differs from group {other}: {told}; start all groups "
                    "with the same checkpoint and the same options of [target]"
                )
        self.wait_no_more()
        self._known[group] = description
        self._joined.add(group)
        self._trouble = None
        self._note_joins()

    def lose(self, group: int, reason: str) -> bool:
        """A group is gone. Returns whether it was there."""
        if group not in self._joined:
            return False
        self._joined.discard(group)
        if group >= self.num_groups:
            del self._known[group]
        if not self._joined:
            loop = asyncio.get_running_loop()
            self._impatience = loop.call_later(self._patience, self._tell, reason)
        return True

    def _note_joins(self) -> None:
        if self._known.keys() >= set(range(self.num_groups)):
            self.all_joined_once.set()

    def note(self, trouble: str) -> None:
        """Note why no group is back yet. The note is dropped once a group is back."""
        self._trouble = trouble

    def wait_no_more(self) -> None:
        """Stop the timer that gives up."""
        if self._impatience is not None:
            self._impatience.cancel()

    def lost_for_good(self, reason: str) -> WorkerLostError:
        """The error of requests that have waited for the target as long as they may."""
        return WorkerLostError(
            f"the target went away and was not back within {self._patience:g} s "
            f"({self._trouble or reason}); start it again, then send the request again"
        )

    def _tell(self, reason: str) -> None:
        self._give_up(self.lost_for_good(reason))

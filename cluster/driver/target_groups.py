"""The target groups: which can be used, and how long requests wait for one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from cluster.decoding.events import TargetJoined
from paceline.errors import CheckpointError, WorkerLostError
from paceline.limits import MAX_SEQUENCE_TOKENS
from paceline.v1 import target_pb2


def joined_by(group: int, shards: Sequence[target_pb2.DescribeTargetResponse]) -> TargetJoined:
    """The event that a group with these shards can step. It has room as its smallest shard has."""
    return TargetJoined(
        time.monotonic(),
        vocab_size=shards[0].vocab_size,
        max_model_len=min(shard.max_model_len for shard in shards),
        block_size=shards[0].block_size,
        num_blocks=min(shard.num_blocks for shard in shards),
        group=group,
        dtype=shards[0].dtype,
        checkpoint_digest=shards[0].checkpoint_digest,
        model=shards[0].model,
    )


def room_in(target: TargetJoined) -> int:
    """The most tokens that one sequence may have."""
    return min(target.max_model_len, target.num_blocks * target.block_size, MAX_SEQUENCE_TOKENS)


def _checkpoint_of(target: TargetJoined) -> dict[str, str]:
    """Properties that all groups must share as long as the driver runs, in words by name."""
    return {
        "model": repr(target.model),
        "vocab_size": str(target.vocab_size),
        "checkpoint_digest": target.checkpoint_digest.hex()[:8] or "unknown",
    }


def _kv_of(target: TargetJoined) -> dict[str, str]:
    """Further properties that groups must share to serve at the same time.

    Otherwise a sequence that moves between groups would not keep its text.
    """
    return {"block_size": str(target.block_size), "dtype": target.dtype or "unknown"}


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
        self._known: dict[int, TargetJoined] = {}
        self._joined: set[int] = set()
        self._impatience: asyncio.TimerHandle | None = None

    @property
    def target(self) -> TargetJoined | None:
        """The known group with the least room; None: none was ever there."""
        return min(self._known.values(), key=room_in, default=None)

    @property
    def any_joined(self) -> bool:
        return bool(self._joined)

    def scale(self, num_groups: int) -> None:
        """The target is to have this number of groups. Those above it do not count any more."""
        self.num_groups = num_groups
        for group in [one for one in self._known if one >= num_groups]:
            if group not in self._joined:
                del self._known[group]
        self._note_joins()

    def join(self, joined: TargetJoined) -> None:
        """A group is there. Raises CheckpointError if it differs from the others."""
        group = joined.group
        for other, known in self._known.items():
            if other == group:
                continue
            theirs, ours = _checkpoint_of(known), _checkpoint_of(joined)
            if other in self._joined:  # A group that is gone may come back changed.
                theirs |= _kv_of(known)
                ours |= _kv_of(joined)
            different = [name for name in ours if ours[name] != theirs[name]]
            if different:
                told = ", ".join(f"{one} {ours[one]} instead of {theirs[one]}" for one in different)
                raise CheckpointError(
                    f"target group {group} differs from group {other}: {told}; start all groups "
                    "with the same checkpoint and the same options of [target]"
                )
        self.wait_no_more()
        self._known[group] = joined
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

"""One sequence at a drafter: its committed tokens, the run-ahead after them, and its grant."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from paceline.errors import ProtocolError
from paceline.prefix_hash import EMPTY_PREFIX_HASH, extend_hash
from paceline.sampling import SequenceSpec


class DraftPath:
    """Tokens 0 to `num_committed` - 1 are committed, the rest of `token_ids` is run-ahead.

    `max_position`: no token is drafted at or beyond it.
    """

    def __init__(self, spec: SequenceSpec, token_ids: Sequence[int], *, max_position: int) -> None:
        self.spec = spec
        self.token_ids: list[int] = []
        self.num_committed = 0
        self._max_position = max_position
        self._until_position = 0
        # Hash of the first n tokens, for n from 0 to len(token_ids).
        self._hashes = [EMPTY_PREFIX_HASH]
        # Length of the path at which the driver was told that no further token will come.
        self._told_last_at: int | None = None
        self._append(token_ids)
        self.num_committed = len(self.token_ids)

    @property
    def room(self) -> int:
        """How many more tokens may be drafted now."""
        if self.at_end:
            return 0
        return max(0, min(self._until_position, self._max_position) - len(self.token_ids))

    @property
    def at_end(self) -> bool:
        """Whether no token can follow: the last one ends the sequence, or the context is full."""
        length = len(self.token_ids)
        if length >= self._max_position:
            return True
        return length > self.spec.prompt_length and self.token_ids[-1] in self.spec.end_token_ids

    @property
    def told_last(self) -> bool:
        """Whether the driver knows that nothing follows this very path."""
        return self._told_last_at == len(self.token_ids)

    @property
    def wants_last(self) -> bool:
        """Whether the driver waits for tokens that cannot come, and has not been told so."""
        return self.at_end and not self.told_last and self._until_position > len(self.token_ids)

    def base_hash(self) -> int:
        """The hash of the whole path: the base of what is drafted next."""
        return self._hashes[-1]

    def grant(self, until_position: int) -> None:
        """Allow tokens for positions below `until_position`. Replaces the grant before."""
        self._until_position = until_position

    def extend(self, drafted: Sequence[int]) -> None:
        """Append drafted tokens. There must be room for them, and none may follow an end token."""
        assert len(drafted) <= self.room, "drafted beyond the grant"
        self._append(drafted)

    def tell_last(self) -> None:
        """Note that the driver is told: no further token comes after this path."""
        self._told_last_at = len(self.token_ids)

    def commit(self, position: int, token_ids: Sequence[int]) -> int:
        """Add committed tokens; the run-ahead that agrees with them stays.

        Returns how many of the path's tokens stayed. Raises ProtocolError when `position` is not
        the number of tokens committed so far.
        """
        if position != self.num_committed:
            raise ProtocolError(
                f"outcome.position: expected {self.num_committed}, the number of committed tokens, "
                f"got {position}"
            )
        agreeing = 0
        for held, token_id in zip(islice(self.token_ids, position, None), token_ids, strict=False):
            if held != token_id:
                break
            agreeing += 1
        kept = len(self.token_ids)
        if agreeing < len(token_ids):
            kept = position + agreeing
            self._truncate_to(kept)
            self._append(token_ids[agreeing:])
        self.num_committed = position + len(token_ids)
        return kept

    def check_integrity(self) -> None:
        """Assert that hashes and lengths belong together."""
        assert len(self._hashes) == len(self.token_ids) + 1
        assert self.num_committed <= len(self.token_ids)
        running = EMPTY_PREFIX_HASH
        for token_id, expected in zip(self.token_ids, self._hashes[1:], strict=True):
            running = extend_hash(running, token_id)
            assert running == expected, "the hash of a prefix is stale"

    def _append(self, token_ids: Sequence[int]) -> None:
        running = self._hashes[-1]
        for token_id in token_ids:
            running = extend_hash(running, token_id)
            self._hashes.append(running)
        self.token_ids.extend(token_ids)

    def _truncate_to(self, length: int) -> None:
        del self.token_ids[length:]
        del self._hashes[length + 1 :]
        if self._told_last_at is not None and self._told_last_at > length:
            self._told_last_at = None

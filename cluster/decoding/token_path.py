"""The tokens of one sequence: what is committed, and the run-ahead that drafters proposed."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.prefix_hash import EMPTY_PREFIX_HASH, extend_hash


class TokenPath:
    """Committed tokens followed by candidates, with the hash of every prefix.

    Proposals are placed by content: where the first `base_length` tokens have the proposal's
    hash. So it does not matter when a proposal arrives, how often, or from whom.
    """

    __slots__ = ("_hashes", "num_committed", "num_pinned", "token_ids")

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self.token_ids: list[int] = []
        self._hashes = [EMPTY_PREFIX_HASH]
        self._extend(prompt_token_ids)
        self.num_committed = len(self.token_ids)
        # Tokens below this position are committed or being verified: a proposal that disagrees
        # with them cannot replace them.
        self.num_pinned = self.num_committed

    @property
    def num_candidates(self) -> int:
        """Length of the run-ahead, the window that is being verified included."""
        return len(self.token_ids) - self.num_committed

    def committed(self) -> tuple[int, ...]:
        """All committed token ids."""
        return tuple(self.token_ids[: self.num_committed])

    def attach(self, base_length: int, base_hash: int, token_ids: Sequence[int]) -> bool:
        """Place a proposal: trim what the path holds already, take the rest.

        Where it disagrees with candidates that are not being verified the newer ones win, since
        they are what the drafter goes on from. Returns False, and takes nothing, when the
        proposal continues something else than this path.
        """
        if base_length > len(self.token_ids) or self._hashes[base_length] != base_hash:
            return False
        for offset, token_id in enumerate(token_ids):
            position = base_length + offset
            if position == len(self.token_ids):
                self._extend(token_ids[offset:])
                return True
            if self.token_ids[position] != token_id:
                if position < self.num_pinned:
                    return False
                self._truncate(position)
                self._extend(token_ids[offset:])
                return True
        return True

    def pin(self, window: int) -> tuple[int, ...]:
        """The first `window` candidates, held fast until the verdict."""
        self.num_pinned = self.num_committed + window
        assert self.num_pinned <= len(self.token_ids)
        return tuple(self.token_ids[self.num_committed : self.num_pinned])

    def unpin(self) -> None:
        """There will be no verdict on what was pinned."""
        self.num_pinned = self.num_committed

    def commit(self, num_accepted: int, token_id: int) -> tuple[int, ...]:
        """Apply a verdict; returns the newly committed tokens.

        The run-ahead beyond stays where its next token is the very token that the target chose,
        else it is dropped.
        """
        before = self.num_committed
        tip = before + num_accepted
        assert tip <= self.num_pinned, "more candidates accepted than were verified"
        if tip == len(self.token_ids) or self.token_ids[tip] != token_id:
            self._truncate(tip)
            self._extend((token_id,))
        self.num_committed = self.num_pinned = tip + 1
        return tuple(self.token_ids[before : tip + 1])

    def check_integrity(self) -> None:
        """Assert that the hashes fit the tokens and the marks are in order."""
        assert len(self._hashes) == len(self.token_ids) + 1
        assert self.num_committed <= self.num_pinned <= len(self.token_ids)
        for position, token_id in enumerate(self.token_ids):
            assert self._hashes[position + 1] == extend_hash(self._hashes[position], token_id)

    def _truncate(self, length: int) -> None:
        del self.token_ids[length:]
        del self._hashes[length + 1 :]

    def _extend(self, token_ids: Sequence[int]) -> None:
        prefix_hash = self._hashes[-1]
        for token_id in token_ids:
            prefix_hash = extend_hash(prefix_hash, token_id)
            self.token_ids.append(token_id)
            self._hashes.append(prefix_hash)

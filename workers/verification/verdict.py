"""The result of verification."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """The accepted candidates are committed, and after them `token_id`.

    `token_id` is the target's own token: the recovered one if candidates were refused, the bonus
    token if a path was accepted to its end. `accepted` are the indices of the accepted candidates,
    each the child of the one before. If omitted, they are the first `num_accepted`.
    """

    num_accepted: int
    token_id: int
    accepted: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.accepted:
            object.__setattr__(self, "accepted", tuple(range(self.num_accepted)))
        assert len(self.accepted) == self.num_accepted, "a path and its length disagree"

"""What verification answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """The first `num_accepted` candidates are committed, and `token_id` after them.

    `token_id` is the target's own token: the recovered one where a candidate was refused, the
    bonus where all were accepted.
    """

    num_accepted: int
    token_id: int

"""Drafters in the driver's own process, which answer at once: what the scheduler asks of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from cluster.decoding.events import DraftDeclined, DrafterLost, Proposed
from cluster.decoding.instructions import (
    CloseDraft,
    Instruction,
    OpenDraft,
    SendGrant,
    SendOutcome,
)
from workers.drafting.desk import Declined, DraftingSession

MOST_DELAY = 0.05
"""The part of a step by which drafters at hand may delay it, so that it has their candidates."""

TRIED_AGAIN = 64
"""Steps after which a delay that was too long is tried again."""

DraftAnswer = Proposed | DraftDeclined | DrafterLost


class DraftersAtHand(Protocol):
    """The drafters in the driver's process. They keep the contract of all others."""

    @property
    def names(self) -> Collection[str]:
        """Names of those that can be used."""

    @property
    def has_work(self) -> bool:
        """Whether `heed` without instructions would draft."""

    @property
    def is_reading(self) -> bool:
        """Whether one of them still reads a long text, in pieces that take milliseconds each."""

    @property
    def delay_seconds(self) -> float:
        """Expected time for a sequence in `before_step`; 0: not known yet."""

    def before_step(self, num_sequences: int) -> AbstractContextManager[None]:
        """Measures work for this many sequences, for which a step waits."""

    def heed(self, now: float, instructions: Sequence[Instruction]) -> Sequence[DraftAnswer]:
        """Follow instructions, then run one pass where there is work. Returns what came of it."""


def tell(session: DraftingSession, instructions: Iterable[Instruction]) -> list[Declined]:
    """Hand instructions for a drafter to the session that it has for this driver.

    Returns what it declines. Raises ProtocolError for an instruction that breaks the
    contract.
    """
    refused: list[Declined] = []
    for one in instructions:
        match one:
            case SendOutcome():
                refusal = session.outcome(
                    one.sequence_id, one.position, one.token_ids, one.top_tokens
                )
            case SendGrant():
                refusal = None
                session.grant(one.sequence_id, one.grant)
            case OpenDraft():
                refusal = session.open(
                    one.sequence_id,
                    one.spec,
                    one.token_ids,
                    vocab_size=one.vocab_size or None,
                    stopping=one.stopping,
                    tenant=one.tenant,
                )
            case CloseDraft():
                refusal = None
                session.close(one.sequence_id)
            case _:
                raise AssertionError(f"not for a drafter: {one}")
        if refusal is not None:
            refused.append(refusal)
    return refused

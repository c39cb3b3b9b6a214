"""The time that the programs themselves take, besides devices and networks."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from workers.drafting.desk import QUIET_SECONDS, QUIET_SECONDS_OF_MANY


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Times of driver, drafters and gRPC in milliseconds (docs/performance/simulation.md).

    - `hop_ms`: a message from one process to another.
    - The driver, before a step leaves: `event_ms` for an event, `verdict_ms` for each verdict and
      `proposal_ms` for each proposal in it.
    - The driver, while the target computes: `settle_ms` to count a verdict and tell its caller,
      `tell_ms` for each message to a drafter.
    - A drafter: `draft_ms` for each proposal of a pass, as a part of the pass, and the same again
      to send it; `pause_ms` between two passes; `heed_ms` for each instruction that it reads. Then
      it waits `quiet_ms`, or with several sequences `quiet_of_many_ms`, for further messages.
    """

    hop_ms: float = 0.32
    event_ms: float = 0.18
    verdict_ms: float = 0.03
    proposal_ms: float = 0.025
    settle_ms: float = 0.04
    tell_ms: float = 0.05
    pause_ms: float = 0.18
    draft_ms: float = 0.003
    heed_ms: float = 0.015
    quiet_ms: float = 1000 * QUIET_SECONDS
    quiet_of_many_ms: float = 1000 * QUIET_SECONDS_OF_MANY

    def times(self, factor: float) -> HostCosts:
        """These costs with all work multiplied by `factor`. Waiting for messages stays."""
        done = [one.name for one in fields(self) if not one.name.startswith("quiet")]
        return replace(self, **{name: factor * getattr(self, name) for name in done})

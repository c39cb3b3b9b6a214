"""A shard's rehearsals keep the contract of target.proto, and may go on for ever."""

from __future__ import annotations

from workers.step_rehearsal import StepRehearsal


def test_rehearsals_are_sound_and_nothing_grows() -> None:
    rehearsal = StepRehearsal()
    for _ in range(200):  # Its session has room for 64 tokens a sequence, and refuses more.
        rehearsal.run()
        rehearsal.check_integrity()

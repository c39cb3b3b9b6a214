"""The driver's rehearsals: sound, without end, and only where they are worth it."""

from __future__ import annotations

import asyncio

from cluster.rehearsal import Rehearsal


async def test_sequences_follow_each_other_and_nothing_is_leaked() -> None:
    rehearsal = Rehearsal()
    windows = set()
    for _ in range(400):
        rehearsal.run()
        rehearsal.check_integrity()
        windows.add(rehearsal.window)
    assert rehearsal.num_finished > 2
    assert max(windows) > 0, "no candidate was verified"


class _Counted(Rehearsal):
    def __init__(self) -> None:
        super().__init__()
        self.runs = asyncio.Queue[None]()

    def run(self) -> None:
        super().run()
        self.runs.put_nowait(None)


async def test_it_rehearses_before_an_answer_that_takes_long_and_not_otherwise() -> None:
    rehearsal = _Counted()
    rehearsal.expect(0.001, sequences=1)
    assert not rehearsal.expects
    rehearsal.expect(0.02, sequences=64)
    assert not rehearsal.expects
    for _ in range(2):
        rehearsal.expect(0.02, sequences=1)
        assert rehearsal.expects
        await asyncio.wait_for(rehearsal.runs.get(), 30)
        assert not rehearsal.expects
    rehearsal.expect(0.02, sequences=1)
    rehearsal.end()
    assert not rehearsal.expects

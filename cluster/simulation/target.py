"""A simulated target group. It answers steps when the device of its profile would.

Like the emulated target (workers/emulated/replay_target.py), it stores token ids where a model
stores keys and values, and answers from what it reads there. So a block that was given out twice, a
forgotten move or a rollback to the wrong place changes the text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster.decoding.events import SequenceVerdict
from cluster.decoding.instructions import RunStep, Slice
from cluster.simulation.clock import VirtualClock
from paceline.sampling import SequenceSpec
from workers.emulated.latency_profiles import DeviceProfile
from workers.emulated.replay_text import PrefixReader, ReplayText
from workers.verification.candidates import depths_of

BLOCK_SIZE = 16
_SHIFT, _MASK = 4, 15

Answer = Callable[[int, tuple[SequenceVerdict, ...], float], None]
"""Called when the device is done, with the step's number, its verdicts and seconds."""


@dataclass(slots=True)
class _Opened:
    spec: SequenceSpec
    table: list[int]
    # Has read the first `num_read` positions, which nothing writes again.
    reader: PrefixReader = field(default_factory=PrefixReader)
    num_read: int = 0


@dataclass(slots=True)
class TargetMeter:
    """Seconds that the device computed, in total and in steps with prefill; passes; tokens."""

    busy_seconds: float = 0.0
    prefill_seconds: float = 0.0
    waiting_seconds: float = 0.0
    """Seconds without a pass although there was work."""
    passes: int = 0
    tokens: int = 0


class SimulatedTarget:
    """One target group. It computes steps in the order in which they came.

    While a drafter computes on its host (`drafting`), each part of a step takes `beside` times as
    long.
    """

    def __init__(
        self, clock: VirtualClock, profile: DeviceProfile, text: ReplayText, *, beside: float = 1.0
    ) -> None:
        self.meter = TargetMeter()
        self.answer: Answer
        """Set by the driver."""
        self._clock = clock
        self._pass_ms = profile.pass_ms
        self._text = text
        self._free_at = 0.0  # When the last step ended.
        self._beside = beside
        self._num_drafting = 0
        # The steps that wait; of the step in progress: its work that is left, in seconds alone on
        # the host, as of a moment, and when it began.
        self._queue: deque[tuple[RunStep, tuple[SequenceVerdict, ...], float]] = deque()
        self._left, self._as_of, self._began = 0.0, 0.0, 0.0
        self._planned = 0  # The latest plan of its end; earlier ones no longer hold.
        self._work_since: float | None = None
        self._opened: dict[int, _Opened] = {}
        # For each written block: a token id and a position in each slot.
        self._blocks: dict[int, list[tuple[int, int] | None]] = {}

    def has_work(self) -> None:
        """There are sequences to decode from now on, until `has_none`."""
        if self._work_since is None:
            self._work_since = self._clock.now

    def has_none(self) -> None:
        self._work_since = None

    def step(self, step: RunStep) -> None:
        for sequence_id in step.close:
            del self._opened[sequence_id]
        for one in step.open:
            assert one.sequence_id not in self._opened, "opened twice"
            self._opened[one.sequence_id] = _Opened(one.spec, list(one.shared_blocks))
        verdicts = tuple(
            verdict for part in step.slices if (verdict := self._feed(part)) is not None
        )
        tokens = sum(len(part.token_ids) for part in step.slices)
        seconds = self._pass_ms.ms(len(step.slices), tokens) / 1000
        self.meter.passes += 1
        self.meter.tokens += tokens
        self._queue.append((step, verdicts, seconds))
        if len(self._queue) == 1:
            self._begin()

    def drafting(self, begins: bool) -> None:
        """A drafter on this host begins a pass, or ends one."""
        self._left -= (self._clock.now - self._as_of) / self._pace
        self._as_of = self._clock.now
        self._num_drafting += 1 if begins else -1
        if self._queue:
            self._plan_end()

    @property
    def _pace(self) -> float:
        """Seconds that a second of work takes at present."""
        return self._beside if self._num_drafting else 1.0

    def _begin(self) -> None:
        now = self._clock.now
        if self._work_since is not None:
            self.meter.waiting_seconds += now - max(self._work_since, self._free_at)
        self._began = self._as_of = now
        self._left = self._queue[0][2]
        self._plan_end()

    def _plan_end(self) -> None:
        self._planned += 1
        end = self._clock.now + max(0.0, self._left) * self._pace
        self._clock.at(end, self._done, self._planned)

    def _done(self, planned: int) -> None:
        if planned != self._planned:
            return  # Drafting began or ended meanwhile, and so the step ends at another time.
        step, verdicts, _ = self._queue.popleft()
        seconds = self._clock.now - self._began
        self._free_at = self._clock.now
        if self._queue:
            self._begin()
        # Count it at its end, so that its share of any period is at most 1.
        self.meter.busy_seconds += seconds
        if any(len(part.token_ids) > 1 + part.window for part in step.slices):
            self.meter.prefill_seconds += seconds
        self.answer(step.step, verdicts, seconds)

    def _feed(self, part: Slice) -> SequenceVerdict | None:
        """Write the tokens fed by a slice, read them back, and give its verdict."""
        opened = self._opened[part.sequence_id]
        table = opened.table
        for source, to in part.kv_moves:
            self._write(table, to, self._slot(table, source))
        if part.new_blocks:
            table.extend(part.new_blocks)
        start = part.start
        committed = start + len(part.token_ids) - part.window
        in_line = committed if part.parents else start + len(part.token_ids)
        for position in range(start, in_line):
            self._write(table, position, (part.token_ids[position - start], position))
        if part.parents:
            for slot, depth in enumerate(depths_of(part.parents)[1:], start=committed):
                self._write(table, slot, (part.token_ids[slot - start], committed + depth - 1))
        if not part.verdict:
            return None
        self._read(opened, committed)
        return self._verdict(opened, part, committed)

    def _verdict(self, opened: _Opened, part: Slice, committed: int) -> SequenceVerdict:
        """Follow the window while its candidates are the true tokens."""
        reader = opened.reader
        if not part.window:
            token_id = self._text.next_token(reader.digest(), opened.spec)
            return SequenceVerdict(part.sequence_id, 0, token_id)
        children = _children(part)
        path: list[int] = []
        node = 0
        while True:
            token_id = self._text.next_token(reader.digest(), opened.spec)
            for candidate in children[node]:
                pair = self._slot(opened.table, committed + candidate)
                if pair[0] == token_id:
                    break
            else:
                break
            reader = (reader if path else reader.copy()).read_one(*pair)
            path.append(candidate)
            node = candidate + 1
        accepted = tuple(path) if part.parents else ()
        return SequenceVerdict(part.sequence_id, len(path), token_id, accepted)

    def _read(self, opened: _Opened, end: int) -> None:
        """Read the slots below `end`, which hold committed tokens."""
        if opened.num_read > end:
            opened.reader, opened.num_read = PrefixReader(), 0
        for slot in range(opened.num_read, end):
            opened.reader.read_one(*self._slot(opened.table, slot))
        opened.num_read = end

    def _slot(self, table: Sequence[int], slot: int) -> tuple[int, int]:
        held = self._blocks[table[slot >> _SHIFT]][slot & _MASK]
        assert held is not None, "read where nothing was written"
        return held

    def _write(self, table: Sequence[int], slot: int, pair: tuple[int, int]) -> None:
        number = table[slot >> _SHIFT]
        block = self._blocks.get(number)
        if block is None:
            block = self._blocks[number] = [None] * BLOCK_SIZE
        block[slot & _MASK] = pair


def _children(part: Slice) -> Sequence[Sequence[int]]:
    """The candidates under the last committed token, and under each candidate."""
    if not part.parents:
        return [*((candidate,) for candidate in range(part.window)), ()]
    children: list[list[int]] = [[] for _ in range(part.window + 1)]
    for candidate, parent in enumerate(part.parents):
        children[parent].append(candidate)
    return children

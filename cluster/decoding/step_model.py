"""How long a step takes, as the controller of `auto` (auto.py) believes: a sum of parts.

A step takes what the device takes for the rows that it feeds; what messages and the driver take for
the verdicts of its sequences; and what it waits while the driver reads the proposals that arrive
meanwhile. So a candidate has a price as a row of a step, and drafting has one whether candidates
are verified or not. What all steps take longer of late, for whatever reason, is added to each.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.decoding.estimates import TimesBySize
from cluster.decoding.events import StepDone, is_believable
from cluster.decoding.instructions import RunStep

_LEAST_MS = 1e-3
"""No step is believed to take less, whatever the parts of its time come to."""

_DRIFTS = 0.2
"""Of how much a step was mistaken, so much is added to what is believed of the next."""

_UNLIKE_MS, _UNLIKE = 1.0, 1.3
"""A step that takes so much longer than was believed is a surprise."""

_NO_HICCUP = 3
"""So many surprises on end are what steps take now."""


@dataclass(slots=True)
class ObservedStep:
    """A step of the batch: its sequences that decode, the rows that it feeds for them and in all.

    `proposals`: that arrived while it was computed. `ms`: from sending to answer.
    """

    sent_at: float = 0.0
    sequences: int = 1
    decoding_rows: int = 1
    rows: int = 1
    proposals: int = 0
    ms: float = 0.0

    @property
    def has_prefill(self) -> bool:
        """Whether prompts were computed in it too."""
        return self.rows > self.decoding_rows


class StepModel:
    """Observes every step. Times of events are seconds, estimates milliseconds."""

    def __init__(self) -> None:
        self.last = ObservedStep()
        self._device = TimesBySize()  # by rows
        self._host = TimesBySize()  # by sequences: what a step takes besides
        self._reading = TimesBySize(nothing_takes_none=True)  # by proposals: what more than that
        self._drift_ms = 0.0  # what steps of late took longer than by these three
        self._work = TimesBySize()  # by messages since the answer before: what the driver works
        self._heard = 0  # proposals since the last answer
        self._surprises = 0  # steps on end that were
        self._sent: dict[tuple[int, int], ObservedStep] = {}  # by target group and number

    @property
    def known(self) -> bool:
        """Whether a step was seen."""
        return self._device.known

    def ms(
        self, rows: float, sequences: float, proposals: float, *, hopeful: bool = False
    ) -> float:
        """Of a step of so many, while so many proposals arrive. Some step must have been seen.

        No step ends before the driver has read what was sent to it meanwhile. `hopeful`: more
        proposals than ever came at a time take no longer, for all that is known.
        """
        if hopeful:
            proposals = min(proposals, self._reading.largest)
        ms = max(self._parts_ms(rows, sequences, proposals) + self._drift_ms, _LEAST_MS)
        return max(ms, self._work.ms(sequences + proposals)) if self._work.known else ms

    def _parts_ms(self, rows: float, sequences: float, proposals: float) -> float:
        return self._device.ms(rows) + self._host.ms(sequences) + self._reading.ms(proposals)

    def estimates(self) -> dict[str, float]:
        """Of steps like the last one: what they take, what a candidate and a proposal add."""
        if not self.known:
            return {}
        last = self.last
        return {
            "step_ms": self.ms(last.rows, last.sequences, last.proposals),
            "step_ms_per_candidate": self._device.ms_per_unit(last.rows),
            "step_ms_per_proposal": self._reading.ms_per_unit(last.proposals),
        }

    def sent(self, now: float, step: RunStep) -> None:
        """A step goes out."""
        # Of a step that was lost with its target nothing more comes.
        self._sent = {key: one for key, one in self._sent.items() if key[0] != step.group}
        decoding = [part for part in step.slices if part.decodes]
        self._sent[step.group, step.step] = ObservedStep(
            sent_at=now,
            sequences=max(1, len(decoding)),
            decoding_rows=sum(len(part.token_ids) for part in decoding),
            rows=sum(len(part.token_ids) for part in step.slices),
        )

    def heard(self, proposals: int) -> None:
        """So many proposals arrived."""
        self._heard += proposals
        for step in self._sent.values():
            step.proposals += proposals

    def answered(self, event: StepDone) -> bool:
        """The step is back; whether it took far longer than was believed."""
        step = self._sent.pop((event.group, event.step), None)
        if step is None:
            return False
        step.ms = (event.now - step.sent_at) * 1000
        self.last = step
        if event.driver_seconds > 0:
            self._work.add(step.sequences + self._heard, event.driver_seconds * 1000)
        self._heard = 0
        if not is_believable(event.now - step.sent_at):
            return False
        size = step.rows, step.sequences, step.proposals
        believed_ms = self.ms(*size) if self.known else step.ms
        surprising_ms = max(_UNLIKE * believed_ms, believed_ms + _UNLIKE_MS)
        surprises = step.ms > surprising_ms
        self._surprises = self._surprises + 1 if surprises else 0
        afresh = self._surprises >= _NO_HICCUP
        # Before that it may be one of the host, which counts as the longest step that is none.
        ms = step.ms if afresh else min(step.ms, surprising_ms)
        device_ms = min(max(0.0, event.step_seconds * 1000), ms)
        besides_ms = ms - device_ms
        self._device.add(step.rows, device_ms, afresh=afresh)
        host_ms = max(0.0, besides_ms - self._reading.ms(step.proposals))
        self._host.add(step.sequences, host_ms, afresh=afresh)
        if step.proposals:
            waited_ms = max(0.0, besides_ms - self._host.ms(step.sequences))
            self._reading.add(step.proposals, waited_ms, afresh=afresh)
        mistaken_ms = ms - self._parts_ms(*size)
        self._drift_ms = (
            0.0 if afresh else self._drift_ms + _DRIFTS * (mistaken_ms - self._drift_ms)
        )
        return surprises

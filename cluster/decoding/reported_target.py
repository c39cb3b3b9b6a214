"""Drafting for a target whose steps happen elsewhere and are only reported: another engine's.

The scheduler (scheduler.py) plans the steps of its target. Here an engine such as vLLM plans its
own. It reports what each step committed, and asks for the candidates of the next. Sequences, trees,
policies, grants and drafters are the scheduler's own; only batches and KV are not ours.

A report has two phases, as an event has in the scheduler. `step_done` and `windows` do what the
next step needs. `messages` does everything else and returns what drafters are told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.decoding.batching import Batching, Target
from cluster.decoding.counts import Foresight
from cluster.decoding.events import DraftEvent, Request, SequenceVerdict, StepDone
from cluster.decoding.instructions import FinishReason, Instruction, RunStep, Slice
from cluster.decoding.policy import Wait, window_of
from cluster.decoding.prefix_cache import PrefixCache
from cluster.decoding.proposals import take_draft_event
from cluster.decoding.sequence import Sequence as Decoded
from cluster.decoding.state import DecodingState, Deferred, TargetGroup
from cluster.decoding.step_answers import Answer, Commit, report_answer
from cluster.decoding.waiting import WaitingLine
from paceline.generation import SpeculationStats
from paceline.options import Stopping
from paceline.sampling import SamplingParams, SequenceSpec
from workers.engine.kv_blocks import KvKind

_LIKELIEST = SamplingParams(temperature=0.0)
_NO_KV = KvKind(1, "", b"")


@dataclass(frozen=True, slots=True)
class ReportedOptions:
    """How sequences of a reported target are drafted for.

    `vocab_size`, `max_model_len`: of the target, in tokens. `policy`, `window`, `stopping`,
    `drafter`: as in a request. `wait_seconds`: upper bound on the wait of a policy that waits.
    """

    vocab_size: int
    max_model_len: int
    policy: str = "chain"
    window: int = 8
    stopping: Stopping = Stopping.FIXED
    drafter: str | None = None
    wait_seconds: float = 1.0


class ReportedTarget:
    """The sequences of a target that only reports, and their drafters.

    Drafters draft their likeliest tokens, since the target's sampling parameters are not known
    here. A step verifies chains.
    """

    def __init__(self, options: ReportedOptions) -> None:
        self._options = options
        waiting = WaitingLine()
        self._state = DecodingState(
            lambda number: TargetGroup(number, Batching(waiting, group=number)),
            waiting,
            serves_auto=options.policy == "auto",
        )
        self._state.scale(0.0, 1)
        (self._group,) = self._state.groups
        self._batching = self._group.batching
        self._batching.join_target(
            Target(
                vocab_size=options.vocab_size,
                max_model_len=options.max_model_len,
                kv=PrefixCache(1, _NO_KV, enabled=False),
            )
        )
        self._state.drafters.target_vocab_size = options.vocab_size
        self._out = Deferred()
        self._now = 0.0
        self._last_id = self._last_step = 0
        self._answer: Answer | None = None
        self._sent: RunStep | None = None  # The step that began, until drafters are told of it.
        self._stepping: RunStep | None = None
        self._has_new = False
        self.totals = self._state.totals

    @property
    def num_sequences(self) -> int:
        return len(self._batching.running)

    def has(self, sequence_id: int) -> bool:
        return sequence_id in self._batching.running

    def speculation(self) -> SpeculationStats:
        return replace(self._state.speculation(), efficiency=None)  # Some steps are not known.

    def open(self, now: float, token_ids: Sequence[int], prefix_hash: int | None = None) -> int:
        """Begin to draft after these committed tokens. Returns the new sequence's id.

        `prefix_hash`: of these tokens, since hashing a long text takes milliseconds. They must be
        fewer than `max_model_len`.
        """
        self._last_id += 1
        options, length = self._options, len(token_ids)
        request = Request(
            sequence_id=self._last_id,
            prompt_token_ids=tuple(token_ids),
            spec=SequenceSpec(_LIKELIEST, seed=0, prompt_length=length),
            max_tokens=options.max_model_len - length,
            policy=options.policy,
            window=options.window,
            stopping=options.stopping,
            drafter_kind=options.drafter,
            prefix_hash=prefix_hash,
            trees=False,
        )
        sequence = Decoded.admitted(request, now)
        if sequence.pilot is not None:
            self._state.auto.admitted(sequence.pilot)
            sequence.steer(sequence.pilot)
        self._batching.let_in(sequence)
        sequence.kv.open_at_target = True
        sequence.kv.length = length - 1
        self._has_new = True
        return self._last_id

    def close(self, now: float, sequence_id: int) -> None:
        sequence = self._batching.running[sequence_id]
        sequence.kv.in_flight = None
        self._state.finish(now, sequence, FinishReason.CANCELLED, self._out)
        self._batching.closes.clear()
        if self._answer is not None:
            commits = self._answer.commits
            self._answer.commits = [one for one in commits if one.sequence is not sequence]
        if self._sent is not None:
            slices = [one for one in self._sent.slices if one.sequence_id != sequence_id]
            self._sent = replace(self._sent, slices=tuple(slices))

    def step_done(
        self,
        now: float,
        committed: Mapping[int, tuple[int, ...]],
        step_seconds: float | None,
    ) -> None:
        """The target ended a step.

        `committed`: by sequence id, the tokens that it committed, at least one each. They need not
        be those of one step: a report may have been missed. `step_seconds`: time of the step; None:
        not known, or not one of decoding alone. Call `messages` before the next report.
        """
        assert self._answer is None, "a report before the rest of the last one"
        step, self._stepping = self._stepping, None
        parts = {} if step is None else {part.sequence_id: part for part in step.slices}
        running = self._batching.running
        for sequence_id in parts.keys() - committed.keys():
            if (absent := running.get(sequence_id)) is not None:
                absent.kv.in_flight = None
                absent.tree.unpin()
        self._now = now
        self._state.totals.steps += 1
        self._state.utilization.stepped(step_seconds or 0.0)
        commits, slices, verdicts = [], [], []
        before = self.totals.counts.committed
        for sequence_id, token_ids in committed.items():
            sequence = running[sequence_id]
            part = parts.get(sequence_id) or _plain_slice(sequence)
            commit = _commit(sequence, part, token_ids)
            sequence.make_ready(now)
            commits.append(commit)
            slices.append(part)
            verdicts.append(commit.verdict)
        number = 0  # None that `auto` knows, so that it does not learn from its time.
        if step is not None and step_seconds is not None:
            number = step.step
        else:
            self._state.costs.pause()
        done = RunStep(number, (), (), tuple(slices))
        event = StepDone(now, number, tuple(verdicts), step_seconds=step_seconds or 0.0)
        self._answer = Answer(event, done, self._batching, before, commits)

    def windows(
        self, now: float, sequence_ids: Sequence[int], *, may_wait: bool = True
    ) -> Mapping[int, tuple[int, ...]] | Wait:
        """The candidates that the next step of these sequences verifies, by sequence id.

        Or until when to wait for more of them, where the policy waits. `may_wait`: False to take
        what there is.
        """
        if self._answer is not None and self._answer.steers:
            self._report()  # `auto` may give a sequence another policy, or another window.
        running, options = self._batching.running, self._options
        ready: list[tuple[Decoded, int]] = []
        until: float | None = None
        for sequence_id in sequence_ids:
            sequence = running[sequence_id]
            patience = min(options.wait_seconds, sequence.patience) if may_wait else 0.0
            window = window_of(sequence.policy, sequence.view, now, patience)
            if isinstance(window, Wait):
                until = window.until if until is None else min(until, window.until)
            else:
                ready.append((sequence, window))
        if until is not None:
            return Wait(until)
        found: dict[int, tuple[int, ...]] = {}
        slices: list[Slice] = []
        for sequence, window in ready:
            pinned = sequence.tree.pin(min(window, sequence.useful_candidates))
            assert not pinned.parents, "a tree for a target that verifies chains"
            part = _plain_slice(sequence, pinned.token_ids)
            sequence.kv.in_flight = part
            slices.append(part)
            found[sequence.sequence_id] = pinned.token_ids
        self._last_step += 1
        self._stepping = self._sent = RunStep(self._last_step, (), (), tuple(slices))
        self._now = now
        return found

    def handle(self, event: DraftEvent) -> list[Instruction]:
        """Take in what a drafter did. Returns what drafters are told."""
        told = self.messages()
        self._now = event.now
        take_draft_event(self._state, event, self._out)
        return [*told, *self.messages()]

    def messages(self) -> list[Instruction]:
        """Do what the next step did not need. Returns what drafters are told, in order."""
        self._report()
        if self._has_new:
            self._has_new = False
            self._state.assign(self._out)
        step, self._sent = self._sent, None
        if step is not None:
            self._state.sent(self._now, step, self._out)
        self._state.utilization.observe(self._now, at_work=self._state.at_work)
        out, self._out = self._out, Deferred()
        return out.drafters

    def check_integrity(self) -> None:
        for sequence in self._batching.running.values():
            sequence.tree.check_integrity()
            assert sequence.kv.length == sequence.tree.num_committed - 1
        assert not self._batching.leaving
        assert not self._batching.closes
        self._state.drafters.check_integrity(self._state.sequences())

    def _report(self) -> None:
        if self._answer is not None:
            answer, self._answer = self._answer, None
            report_answer(self._state, answer, self._out)


def _plain_slice(sequence: Decoded, candidates: tuple[int, ...] = ()) -> Slice:
    """A slice that feeds the last committed token and a chain of candidates."""
    token_ids = sequence.tree.token_ids
    return Slice(
        sequence_id=sequence.sequence_id,
        start=len(token_ids) - 1,
        token_ids=(token_ids[-1], *candidates),
        window=len(candidates),
        verdict=True,
        new_blocks=(),
    )


def _commit(sequence: Decoded, part: Slice, token_ids: tuple[int, ...]) -> Commit:
    """Commit what a step reported, and compare it with the window that it had."""
    tree, position = sequence.tree, sequence.tree.num_committed
    *path, last = token_ids
    accepted = 0
    for candidate, token_id in zip(part.token_ids[1:], path, strict=False):
        if candidate != token_id:
            break
        accepted += 1
    foresight = Foresight.NOTHING
    if accepted == len(path):
        foresight = tree.foresight(range(accepted), last)
        tree.commit(range(accepted), last)
    else:  # Tokens of a step whose window is not known here.
        tree.advance(token_ids)
    sequence.kv.in_flight = None
    sequence.kv.length = tree.num_committed - 1
    offset = position - sequence.request.spec.prompt_length
    verdict = SequenceVerdict(sequence.sequence_id, accepted, last)
    return Commit(sequence, part, verdict, offset, position, token_ids, foresight)

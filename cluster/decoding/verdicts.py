"""Reading verdicts: whether they answer a step, what they commit, where a sequence ends."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.decoding.events import SequenceVerdict
from cluster.decoding.instructions import FinishReason, RunStep, Slice
from cluster.decoding.sequence import Sequence
from paceline.errors import ProtocolError
from workers.verification.rule import rule_named


def check_verdicts(step: RunStep, verdicts: Iterable[SequenceVerdict], vocab_size: int) -> None:
    """Raise ProtocolError unless the verdicts answer the step.

    Each must belong to a slice that asks for one and accept a path of its window. An error in place
    of an answer is allowed.
    """
    asked = [part for part in step.slices if part.verdict]
    if [part.sequence_id for part in asked] != [v.sequence_id for v in verdicts]:
        raise ProtocolError(f"the verdicts of step {step.step} do not match its slices")
    for part, verdict in zip(asked, verdicts, strict=True):
        sequence_id, window = part.sequence_id, part.window
        if verdict.error is not None:
            continue
        if not 0 <= verdict.num_accepted <= window or not (0 <= verdict.token_id < vocab_size):
            raise ProtocolError(
                f"the verdict of sequence {sequence_id} accepts {verdict.num_accepted} of "
                f"{window} candidates and adds token {verdict.token_id} "
                f"of a vocabulary of {vocab_size}"
            )
        accepted = accepted_path(verdict)
        is_told = verdict.accepted or part.parents  # Else the path is the start of the chain.
        if is_told and (len(accepted) != verdict.num_accepted or not _is_path(part, accepted)):
            raise ProtocolError(
                f"the verdict of sequence {sequence_id} accepts the candidates "
                f"{list(accepted)}, which do not form a path of its window"
            )


def _is_path(part: Slice, accepted: tuple[int, ...]) -> bool:
    """Whether these candidates of a window are a path from its root."""
    if not part.parents:
        return accepted == tuple(range(len(accepted)))
    above = 0
    for index in accepted:
        if not 0 <= index < part.window or part.parents[index] != above:
            return False
        above = index + 1
    return True


def accepted_path(verdict: SequenceVerdict) -> tuple[int, ...]:
    """Indices of the accepted path. In a chain these are the first `num_accepted`."""
    if verdict.accepted or not verdict.num_accepted:
        return verdict.accepted
    return tuple(range(verdict.num_accepted))


def gives_up_bonus(sequence: Sequence, accepted: tuple[int, ...]) -> bool:
    """Whether the token after an accepted window is left to the candidates that follow it.

    Rules that toss coins need this: the run-ahead was drawn as if its own first token came next, so
    that token must be verified (docs/policies.md, pearl). The decision depends on what has arrived,
    never on a token's value. If no candidate was accepted, the token is taken, because otherwise
    the step would have brought nothing.
    """
    if rule_named(sequence.request.spec.rule).shares_noise or not accepted:
        return False
    return sequence.tree.run_ahead_follows(accepted)


def cut_at_end(
    sequence: Sequence, offset: int, committed: tuple[int, ...]
) -> tuple[tuple[int, ...], FinishReason | None]:
    """The part of newly committed tokens that the caller gets, and why the sequence ends there.

    `offset`: output tokens before them. The reason is None if the sequence goes on.
    """
    request = sequence.request
    room = request.max_tokens - offset
    kept, reason = committed, None
    if len(committed) >= room:
        kept, reason = committed[:room], FinishReason.LENGTH
    for index, token_id in enumerate(kept):
        if token_id in request.spec.end_token_ids:
            kept, reason = kept[: index + 1], FinishReason.STOP
            break
    if request.stop_scanner is not None:
        stop = request.stop_scanner.first_stop(kept)
        if stop is not None:
            kept, reason = kept[:stop], FinishReason.STOP
    return kept, reason

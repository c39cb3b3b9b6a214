"""Slices with trees, moves and draft probabilities: their effects, and refusals by field."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from paceline.errors import ProtocolError
from paceline.sampling import SamplingParams, SequenceSpec
from paceline.v1 import target_pb2, types_pb2
from paceline.wire.sequences import spec_to_wire
from workers.target.step_sequences import EngineLimits, StepWork, TargetSession

LIMITS = EngineLimits(vocab_size=100, max_model_len=40, block_size=16, num_blocks=5)
NAN = float("nan")


def opened_session(rule: str) -> TargetSession:
    """A session whose sequence 1 holds the tokens 1, 2, 3 in the first of two blocks."""
    session = TargetSession(LIMITS)
    spec = SequenceSpec(SamplingParams(), seed=1, prompt_length=3, rule=rule)
    session.begin_step(
        target_pb2.StepRequest(
            step=1,
            open=[target_pb2.TargetSequence(sequence_id=1, spec=spec_to_wire(spec))],
            slices=[piece(start=0, token_ids=[1, 2, 3], new_blocks=[0, 1])],
        )
    )
    return session


def piece(**fields: Any) -> target_pb2.Slice:
    """A slice that decodes plainly, except for the fields given."""
    return target_pb2.Slice(
        **{"sequence_id": 1, "start": 3, "token_ids": [7], "verdict": True, **fields}
    )


def window(candidates: Sequence[int], parents: Sequence[int], **fields: Any) -> target_pb2.Slice:
    """A slice with token 7 and candidates after it."""
    return piece(token_ids=[7, *candidates], window=len(candidates), parents=parents, **fields)


def drawn_from(
    node: int, token_ids: Sequence[int], probabilities: Sequence[float]
) -> types_pb2.DraftDistribution:
    return types_pb2.DraftDistribution(node=node, token_ids=token_ids, probabilities=probabilities)


def moves(*pairs: tuple[int, int]) -> list[target_pb2.KvMove]:
    return [target_pb2.KvMove(from_position=a, to_position=b) for a, b in pairs]


def run(session: TargetSession, step: int, slice_: target_pb2.Slice) -> StepWork:
    work = session.begin_step(target_pb2.StepRequest(step=step, slices=[slice_]))
    session.check_integrity()
    return work


def test_a_tree_goes_to_the_engine_with_its_parents() -> None:
    session = opened_session("coupled")
    work = run(session, 2, window([20, 21, 22], [0, 0, 2], top_tokens=True))
    (slice_,), (task,) = work.slices, work.tasks
    assert (slice_.start, list(slice_.token_ids), slice_.num_logits) == (3, [7, 20, 21, 22], 4)
    assert (slice_.tree_start, tuple(slice_.parents)) == (4, (0, 0, 2))
    assert list(task.prefix) == [1, 2, 3, 7]
    assert (task.candidates.tree.token_ids, task.candidates.tree.parents) == (
        (20, 21, 22),
        (0, 0, 2),
    )
    assert (task.names_path, task.has_verdict, list(task.fed)) == (True, True, [7, 20, 21, 22])


def test_a_chain_is_a_chain_however_it_is_written() -> None:
    for parents in ((), (0, 1)):
        session = opened_session("coupled")
        work = run(session, 2, window([20, 21], parents))
        assert (work.slices[0].tree_start, tuple(work.slices[0].parents)) == (None, ())
        assert work.tasks[0].names_path == bool(parents)
        # If it is accepted to its end, nothing has to be moved.
        assert run(session, 3, piece(start=6)).kv_moves == []


def test_tokens_follow_the_moves_of_an_accepted_path() -> None:
    session = opened_session("coupled")
    # Candidates 0 and 1 under token 7, 2 and 3 under candidate 1, 4 under candidate 3.
    run(session, 2, window([20, 21, 22, 23, 24], [0, 0, 2, 2, 4]))
    work = run(session, 3, piece(start=7, kv_moves=moves((5, 4), (7, 5), (8, 6))))
    assert work.kv_moves == [(array("q", [0, 1]), [(5, 4), (7, 5), (8, 6)])]
    assert list(work.tasks[0].prefix) == [1, 2, 3, 7, 21, 23, 24, 7]


def test_a_path_that_lies_right_needs_no_moves() -> None:
    session = opened_session("coupled")
    run(session, 2, window([20, 21, 22], [0, 1, 0]))
    work = run(session, 3, piece(start=6))
    assert (work.kv_moves, list(work.tasks[0].prefix)) == ([], [1, 2, 3, 7, 20, 21, 7])
    # A window that was refused altogether is dropped.
    session = opened_session("coupled")
    run(session, 2, window([20, 21], [0, 0]))
    assert list(run(session, 3, piece(start=4)).tasks[0].prefix) == [1, 2, 3, 7, 7]


HALF = [0.5, 0.5]
BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "parents: expected none or one per candidate, 2, got 1": (
        "coupled",
        {"candidates": [8, 9], "parents": [0]},
    ),
    "parents: expected none or one per candidate, 0, got 1": (
        "coupled",
        {"candidates": [], "parents": [0]},
    ),
    "parents: expected candidate 0 to have a parent from 0 to 0, got 1": (
        "coupled",
        {"candidates": [8, 9], "parents": [1, 0]},
    ),
    "parents: expected candidate 1 to have a parent from 0 to 1, got 2": (
        "coupled",
        {"candidates": [8, 9], "parents": [0, 2]},
    ),
    "parents: expected different tokens under node 0, got [8, 8]": (
        "coupled",
        {"candidates": [8, 8], "parents": [0, 0]},
    ),
    "parents: expected a chain for the rule 'rejection'": (
        "rejection",
        {
            "candidates": [8, 9],
            "parents": [0, 0],
            "distributions": [drawn_from(0, [8, 9], HALF)],
        },
    ),
    "token_ids: expected ids below 100, got 100": (
        "coupled",
        {"candidates": [8, 100], "parents": [0, 0]},
    ),
    "multiplicities: expected none or one per candidate, 2, got 1": (
        "kseq",
        {"candidates": [8, 9], "parents": [0, 0], "multiplicities": [1]},
    ),
    "multiplicities: expected candidates without multiplicities for the rule 'recursive'": (
        "recursive",
        {
            "candidates": [8, 9],
            "parents": [0, 0],
            "multiplicities": [2, 1],
            "distributions": [drawn_from(0, [8, 9], HALF)],
        },
    ),
    "multiplicities: expected at least one path through candidate 1": (
        "kseq",
        {
            "candidates": [8, 9],
            "parents": [0, 0],
            "multiplicities": [1, 0],
            "distributions": [drawn_from(0, [8, 9], HALF)],
        },
    ),
    "multiplicities: expected at most 1 paths below candidate 0, got 2": (
        "kseq",
        {
            "candidates": [8, 9],
            "parents": [0, 1],
            "multiplicities": [1, 2],
            "distributions": [drawn_from(0, [8, 9], HALF), drawn_from(1, [8, 9], HALF)],
        },
    ),
    "distributions: expected draft probabilities for the rule 'rejection', got none": (
        "rejection",
        {"candidates": [8], "parents": []},
    ),
    "distributions: expected draft probabilities for the nodes [0, 1], got them for [0]": (
        "mcsd",
        {
            "candidates": [8, 9],
            "parents": [0, 1],
            "distributions": [drawn_from(0, [8, 9], HALF)],
        },
    ),
    "distributions: expected one distribution per node, got two for node 0": (
        "rejection",
        {
            "candidates": [8],
            "parents": [],
            "distributions": [drawn_from(0, [8, 9], HALF), drawn_from(0, [8, 9], HALF)],
        },
    ),
    "distributions: expected at most 1024 pairs under node 0, got 2 token ids and 1": (
        "rejection",
        {"candidates": [8], "parents": [], "distributions": [drawn_from(0, [8, 9], [1])]},
    ),
    "distributions: expected draft probabilities that sum to 1": (
        "rejection",
        {"candidates": [8], "parents": [], "distributions": [drawn_from(0, [8, 9], [0.5, 0.4])]},
    ),
    "distributions: expected finite draft probabilities": (
        "rejection",
        {"candidates": [8], "parents": [], "distributions": [drawn_from(0, [8, 9], [1, NAN])]},
    ),
    "distributions: expected ascending token ids below 100": (
        "rejection",
        {"candidates": [8], "parents": [], "distributions": [drawn_from(0, [8, 100], HALF)]},
    ),
    "distributions: expected a draft probability above 0 for candidate 0": (
        "rejection",
        {"candidates": [8], "parents": [], "distributions": [drawn_from(0, [9, 10], HALF)]},
    ),
    "new_blocks: 33 tokens need": (
        "coupled",
        {"candidates": list(range(29)), "parents": [0] * 29},
    ),
    "token_ids: 41 tokens exceed max_model_len": (
        "coupled",
        {
            "candidates": [8] * 37,
            "parents": list(range(37)),
            "new_blocks": [2],
        },
    ),
    "kv_moves: expected none, since the last slice held no tree": (
        "coupled",
        {"candidates": [], "parents": [], "kv_moves": moves((2, 1))},
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_window_is_named(message: str) -> None:
    rule, fields = BAD[message]
    with pytest.raises(ProtocolError) as refusal:
        run(opened_session(rule), 2, window(**fields))
    assert str(refusal.value).startswith(f"slices[0].{message}")


def test_too_many_candidates_are_refused() -> None:
    limits = EngineLimits(vocab_size=2000, max_model_len=3000, block_size=3000, num_blocks=1)
    session = TargetSession(limits)
    spec = SequenceSpec(SamplingParams(), seed=1, prompt_length=1)
    slice_ = piece(
        start=0,
        token_ids=range(1026),
        window=1025,
        parents=[0] * 1025,
        new_blocks=[0],
    )
    opened = target_pb2.TargetSequence(sequence_id=1, spec=spec_to_wire(spec))
    with pytest.raises(ProtocolError, match=r"slices\[0\]\.window: expected at most 1024"):
        session.begin_step(target_pb2.StepRequest(step=1, open=[opened], slices=[slice_]))


BAD_MOVES: dict[str, tuple[list[tuple[int, int]], int]] = {
    "expected positions 4 to 7, which hold the candidates of the last slice, got 8 to 4": (
        [(8, 4)],
        5,
    ),
    "expected positions 4 to 7, which hold the candidates of the last slice, got 5 to 3": (
        [(5, 3)],
        5,
    ),
    "expected positions 4 to 7, which hold the candidates of the last slice, got 3 to 4": (
        [(3, 4)],
        5,
    ),
    "expected a child of candidate 0 at position 5, below start, got candidate 1": ([], 6),
    "expected a child of the last committed token at position 4, below start, got candidate 2": (
        [(6, 4)],
        5,
    ),
    "expected a child of candidate 1 at position 5, below start, got candidate 1": ([(5, 4)], 6),
}


@pytest.mark.parametrize("message", BAD_MOVES)
def test_a_bad_move_is_named(message: str) -> None:
    session = opened_session("coupled")
    run(session, 2, window([20, 21, 22, 23], [0, 0, 2, 0]))
    pairs, start = BAD_MOVES[message]
    with pytest.raises(ProtocolError) as refusal:
        run(session, 3, piece(start=start, kv_moves=moves(*pairs)))
    assert str(refusal.value).startswith(f"slices[0].kv_moves: {message}")


def test_a_tree_may_be_wider_than_the_context_is_long() -> None:
    # All candidates are for the last position, 39, and occupy positions up to 47.
    session = opened_session("coupled")
    run(session, 2, piece(token_ids=range(35), new_blocks=[2]))
    work = run(session, 3, piece(start=38, token_ids=range(10), window=9, parents=[0] * 9))
    assert len(work.tasks[0].candidates.tree) == 9
